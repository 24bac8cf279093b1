"""Let a trained GPT go on with a text: `python -m minigrad.generate runs/my-run --prompt "The for statement"`.

The folder is that of a run, finished or still running, trained in any layout; or one of its checkpoints; or one with
GPT-2's files, as Hugging Face's transformers writes them.
"""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from distributed.checkpoint.files import MANIFEST, CheckpointError, complete, read_manifest, read_tensors
from distributed.data.tokenizer import Tokenizer
from minigrad.command_parser import CommandParser
from minigrad.models import GPT, GPTConfig, gpt2
from minigrad.models.generation import Sampling, generate

PROGRAM = "python -m minigrad.generate"
PREFIX = "parameter/"  # of a parameter's name in a checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        sampling = _sampling(args)
        if args.tokens < 0:
            raise ValueError(f"--tokens must be at least 0, got {args.tokens}")
        model = read_model(Path(args.folder))
        tokenizer = find_tokenizer(Path(args.folder))
        prompt = encode(args.prompt, model.config.vocab_size, tokenizer)
        stop = encode(args.stop, model.config.vocab_size, tokenizer) if args.stop else []
        tokens = until(stop, islice(generate(model, prompt, sampling=sampling), args.tokens))
        for part in decode([prompt, tokens], model.config.vocab_size, tokenizer):
            print(part, end="", flush=True)
        print()
    except (ValueError, IndexError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def _sampling(args: argparse.Namespace) -> Sampling:
    """Return what the flags ask for; what is wrong with one is said of the flag."""
    try:
        return Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    except ValueError as error:
        name, _, rule = str(error).removeprefix("Sampling: ").partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {rule}") from error


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a run, a checkpoint, or GPT-2's files")
    parser.add_argument(
        "--prompt",
        default="\n",
        metavar="TEXT",
        help="what to go on with; numbers of tokens, where they are no bytes and there is no tokenizer.json",
    )
    parser.add_argument("--tokens", type=int, default=300, metavar="N", help="at most so many are written")
    parser.add_argument("--stop", metavar="TEXT", help="end where this is written")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 always takes the likeliest")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest only")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest that together have probability P"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text")
    return parser


def read_model(folder: Path) -> GPT:
    """Read a GPT from a run's folder, a checkpoint's, or one with GPT-2's files.

    Raises:
        ValueError: there is no such model in it.
    """
    if (folder / gpt2.CONFIG).is_file():
        model = GPT(gpt2.config_of(folder))
        gpt2.load(model.parameters(), model.config, folder)
        return model
    if (folder / MANIFEST).is_file():
        return _read_checkpoint(folder)
    refused = []
    for checkpoint in complete(folder / "checkpoints"):
        try:
            return _read_checkpoint(checkpoint)
        except CheckpointError as error:
            refused.append(f"; {checkpoint.name}: {error}")
    raise ValueError(
        f"the folder must be a run with a checkpoint, a checkpoint, or GPT-2's files, got {folder}{''.join(refused)}"
    )


def _read_checkpoint(checkpoint: Path) -> GPT:
    manifest = read_manifest(checkpoint)
    try:
        settings: dict[str, Any] = manifest.state["settings"]
        config = GPTConfig(
            vocab_size=settings["vocab"],
            context=settings["context"],
            num_layers=settings["layers"],
            num_heads=settings["heads"],
            width=settings["width"],
        )
        model = GPT(config, dtype=np.dtype(settings["dtype"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"it is not of a GPT: {type(error).__name__}: {error}") from error
    parameters = dict(model.named_parameters())
    names = [PREFIX + name for name in parameters]
    if missing := [name for name in names if name not in manifest.tensors]:
        raise CheckpointError(f"it is not of this GPT: {missing[0]!r} is missing")
    values = read_tensors(checkpoint, manifest, names)
    model.load_state_dict({name: values[PREFIX + name] for name in parameters})
    return model


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a run, or beside GPT-2's files.

    A checkpoint has that of its run.
    """
    return Tokenizer.beside(folder.parent.parent if (folder / MANIFEST).is_file() else folder)


def encode(text: str, vocab_size: int, tokenizer: Tokenizer | None = None) -> list[int]:
    """Return a text's tokens.

    By its tokenizer, by its bytes where there are 256, else the numbers written in it.

    Args:
        text: the prompt.
        vocab_size: of the model.
        tokenizer: of its run; None where it has none.
    Raises:
        ValueError: it has no token.
    """
    if tokenizer is not None:
        tokens = tokenizer.encode(text)
    elif vocab_size == 256:
        tokens = list(text.encode())
    else:
        try:
            tokens = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"a model of {vocab_size} tokens takes their numbers, such as '5 17 2', got {text!r}"
            ) from None
    if not tokens:
        raise ValueError(f"a prompt needs at least one token, got {text!r}")
    return tokens


def until(stop: Sequence[int], tokens: Iterable[int]) -> Iterator[int]:
    """Yield tokens up to and with the first place where they end in `stop`.

    All of them if that is empty.

    Args:
        stop: the tokens of the words to stop at.
        tokens: that the model writes.
    """
    seen: list[int] = []
    for token in tokens:
        yield token
        seen = [*seen, token][-len(stop) :] if stop else []
        if stop and seen == list(stop):
            return


def decode(parts: Iterable[Iterable[int]], vocab_size: int, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """Yield what can be shown of tokens as soon as it is whole.

    What a terminal would obey becomes a box.

    Args:
        parts: tokens as they come.
        vocab_size, tokenizer: see `encode`.
    """
    tokens = (token for part in parts for token in part)
    if tokenizer is not None:
        yield from map(_shown, tokenizer.decode(tokens))
        return
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield _shown(decoder.decode(bytes([token])) if vocab_size == 256 else f"{token} ")
    yield decoder.decode(b"", final=True)


def _shown(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


if __name__ == "__main__":
    sys.exit(main())

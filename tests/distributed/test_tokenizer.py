"""A tokenizer of one's own text: every text comes back, losses compare by the byte, and a run keeps it."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from jobs import ROOT, run_job

from distributed.data.token_files import read_tokens
from distributed.data.tokenizer import Tokenizer, main

pytest.importorskip("tokenizers")

TEXT = "der Baum, die Bäume: the tree and the trees\n\n  grow 🌳 and grow\n" * 30


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "mine.txt").write_text(TEXT)
    assert main([str(tmp_path / "mine.txt"), str(tmp_path / "tokens"), "--vocab", "300"]) == 0
    said = capsys.readouterr().out
    assert f"--text {tmp_path}/tokens/tokens.npy --vocab " in said
    return tmp_path / "tokens"


def test_a_text_comes_back_and_so_does_one_that_was_never_seen(folder: Path) -> None:
    tokenizer = Tokenizer.beside(folder / "tokens.npy")
    assert tokenizer is not None
    tokens = read_tokens(folder / "tokens.npy", vocab_size=tokenizer.vocab_size)
    assert "".join(tokenizer.decode(tokens)) == TEXT
    assert len(tokens) < len(TEXT.encode()) / 2
    assert tokenizer.bytes_a_token(tokens) == len(TEXT.encode()) / len(tokens)
    for other in ("zażółć gęślą", "🌵", "\x00\n"):
        pieces = list(tokenizer.decode(tokenizer.encode(other)))
        assert "".join(pieces) == other
        assert all("\ufffd" not in piece for piece in pieces)
    assert Tokenizer.beside(folder.parent) is None


def test_a_text_can_have_the_tokens_of_a_tokenizer_that_there_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("two trees\nthe Bäume 🌵\n")
    command = [str(tmp_path / "new.txt"), str(tmp_path / "new"), "--tokenizer", str(folder / "tokenizer.json")]
    assert main(command) == 0
    tokenizer = Tokenizer(folder / "tokenizer.json")
    assert read_tokens(tmp_path / "new" / "tokens.npy").tolist() == tokenizer.encode("two trees\nthe Bäume 🌵\n")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert main([*command[:-1], str(tmp_path / "new.txt")]) == 2
    assert main([*command[:-1], str(tmp_path / "nowhere.json")]) == 2


@pytest.mark.parametrize(
    ("content", "vocab", "message"),
    [
        (b"\xff\xfe", "300", "in UTF-8, and "),
        (b"text", "255", "from 256 tokens, the bytes, to 65536, got 255"),
        (b"", "300", "there must be at least one token"),
    ],
)
def test_what_is_wrong_is_one_line(
    content: bytes, vocab: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(content)
    assert main([str(tmp_path / "text"), str(tmp_path / "out"), "--vocab", vocab]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "text"
    taken.write_bytes(b"some words, and some words")
    assert main([str(taken), str(taken), "--vocab", "256"]) == 2
    assert capsys.readouterr().err == f"python -m distributed.data.tokenizer: {taken} cannot be used: File exists\n"


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a tokenizer's file"):
        Tokenizer.beside(tmp_path)


@pytest.mark.long
def test_a_run_keeps_its_tokenizer_and_writes_text(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    np.save(folder / "tokens.npy", np.tile(read_tokens(folder / "tokens.npy"), 4).astype(np.uint16))
    sizes = shlex.split("--steps 2 --layers 1 --heads 1 --width 8 --context 8 --batch 4 --run run")
    flags = ["--text", str(folder / "tokens.npy"), "--vocab", str(tokenizer.vocab_size), *sizes]
    result = run_job([str(ROOT / "examples" / "train_gpt.py"), *flags], ranks=None, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (by_byte,) = re.findall(r"^([\d.]+) nats a byte$", result.stdout, re.MULTILINE)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"{summary['validation_nats_per_byte']:.3f}" == by_byte
    assert "\nthe model writes:\n" in result.stdout
    command = ["-m", "minigrad.generate", "run", "--prompt", "die Bäume", "--tokens", "5"]
    result = run_job(command, ranks=None, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("die Bäume")

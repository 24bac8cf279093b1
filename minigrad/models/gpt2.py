"""GPT-2's weights as files, in the layout of Hugging Face's transformers: a folder of safetensors and a config.json.

    config = gpt2.config_of(folder)
    model = GPT(config)
    gpt2.load(model.parameters(), config, folder)
    gpt2.save(model.parameters(), config, folder)

A rank of a pipeline loads the parameters of its own stages in the same way, and reads no others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minigrad.backend import Array, to_host, xp_of
from minigrad.files import atomic_write
from minigrad.json_files import read_json, to_json
from minigrad.models.gpt import GPTConfig
from minigrad.parameter import Parameter

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# Our name in a block -> theirs, and the shape in widths. Weights are (in, out) in both: nothing is ever transposed.
BLOCK = {
    "norm1.gain": ("ln_1.weight", (1,)),
    "norm1.bias": ("ln_1.bias", (1,)),
    "attention.qkv.weight": ("attn.c_attn.weight", (1, 3)),
    "attention.qkv.bias": ("attn.c_attn.bias", (3,)),
    "attention.out.weight": ("attn.c_proj.weight", (1, 1)),
    "attention.out.bias": ("attn.c_proj.bias", (1,)),
    "norm2.gain": ("ln_2.weight", (1,)),
    "norm2.bias": ("ln_2.bias", (1,)),
    "up.weight": ("mlp.c_fc.weight", (1, 4)),
    "up.bias": ("mlp.c_fc.bias", (4,)),
    "down.weight": ("mlp.c_proj.weight", (4, 1)),
    "down.bias": ("mlp.c_proj.bias", (1,)),
}
MASKS = ("attn.bias", "attn.masked_bias")  # constants in every block of older files
TOKEN, HEAD = "wte.weight", "lm_head.weight"  # one table, which some files hold twice
PREFIX = "transformer."  # before every name but the head's, where the model was saved with its head

# Their key -> our field.
SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context",
    "n_embd": "width",
    "n_layer": "num_layers",
    "n_head": "num_heads",
}
# Their key -> the values with which they compute what `GPT` does. The first is what an absent key means.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of the tanh form
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
END_OF_TEXT = 50256  # the token of GPT-2's own vocabulary; transformers assumes it unless a file says null
# A dtype in a file -> how to read it. NumPy has no bfloat16: its bits are the upper half of a float32's.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

T = TypeVar("T")
Folder = str | os.PathLike[str]
Shape = tuple[int, ...]


def config_of(folder: Folder) -> GPTConfig:
    """Read the sizes of a model from its config.json.

    Dropout stays 0: it is a choice of who trains, `dataclasses.replace(config, dropout=0.1)`.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: it describes no GPT-2, or one that computes something else than `GPT`: lists every such key.
    """
    path = Path(folder) / CONFIG
    theirs = _read(path, dict[str, Any])
    theirs.setdefault("n_positions", theirs.get("n_ctx"))  # its name in the oldest files
    wrong = [
        f"{key} must be {' or '.join(map(repr, values))}, got {theirs[key]!r}"
        for key, values in COMPUTED.items()
        if key in theirs and theirs[key] not in values
    ]
    for key in SIZES:
        size = theirs.get(key)
        if type(size) is not int or size >= 2**31:
            wrong.append(f"{key} must be an integer{' below 2**31' if type(size) is int else ''}, got {size!r}")
    if not wrong and theirs.get("n_inner") not in (None, 4 * theirs["n_embd"]):
        wrong.append(f"n_inner must be 4 n_embd = {4 * theirs['n_embd']} or null, got {theirs['n_inner']!r}")
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    try:
        return GPTConfig(**{ours: theirs[key] for key, ours in SIZES.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load(params: Iterable[Parameter], config: GPTConfig, folder: Folder) -> None:
    """Copy weights from a folder into parameters of a GPT, all or nothing.

    They may be of any dtype, and are cast to the parameter's own.

    Args:
        params: all of the GPT's, or some, such as those of a rank's stages: only their values are read.
        config: of the GPT. Its sizes must be the folder's: parameters alone do not tell how many heads there are, or
            how many layers other ranks have.
    Raises:
        FileNotFoundError: the folder lacks its config.json or a file with weights.
        ValueError: sizes, names, shapes or dtypes do not fit, the head is not the token table, or a file is damaged.
            Lists all that does not fit; no parameter has changed.
    """
    params, folder = list(params), Path(folder)
    _check_sizes(config, folder)
    tensors = _tensors_of(config)
    _check_params(params, tensors)

    stored = _stored_in(folder)
    # Of two names of one table a file may keep either, such as safetensors' save_model does, so no single name decides.
    prefix = PREFIX if any(name.startswith(PREFIX) for name in stored) else ""
    if HEAD in stored:
        stored.setdefault(prefix + TOKEN, stored[HEAD])
    wanted = {prefix + name: shape for name, shape in (tensors[p.name] for p in params)}
    known = {prefix + name for name, _ in tensors.values()} | {HEAD}
    known |= {f"{prefix}h.{i}.{mask}" for i in range(config.num_layers) for mask in MASKS}
    wrong = [f"{name} is unexpected" for name in sorted(stored.keys() - known)]
    wrong += [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name].shape != wanted[name]:
            wrong.append(f"{name} must have shape {wanted[name]}, has {stored[name].shape}")
        if stored[name].dtype not in DTYPES:
            wrong.append(f"{name} must have a dtype of {', '.join(DTYPES)}, has {stored[name].dtype}")
    if not wrong and prefix + TOKEN in wanted and HEAD in stored and not stored[HEAD].equals(stored[prefix + TOKEN]):
        wrong.append(f"{HEAD} must equal {prefix + TOKEN}, as GPT has one table for both, and differs from it")
    if wrong:
        raise ValueError(f"{folder} does not fit: {'; '.join(wrong)}")
    for p in params:
        p.data = xp_of(p.data).asarray(stored[prefix + tensors[p.name].name].read())


def save(params: Iterable[Parameter], config: GPTConfig, folder: Folder) -> None:
    """Write a whole GPT as model.safetensors and config.json.

    transformers reads the folder as a GPT2LMHeadModel. Values are written in the parameters' dtype. The folder is made
    if need be. Each of the two files replaces an older one whole, once both are written; other files are left alone.

    Raises:
        ValueError: the parameters are not those of a whole GPT of this configuration: lists all that is wrong.
    """
    params, folder = list(params), Path(folder)
    tensors = _tensors_of(config)
    _check_params(params, tensors)
    missing = sorted(tensors.keys() - {p.name for p in params})
    if missing:
        raise ValueError(f"a model must be saved whole, parameters are missing: {', '.join(missing)}")

    values = {PREFIX + tensors[p.name].name: to_host(p.data) for p in params}
    end = END_OF_TEXT if config.vocab_size > END_OF_TEXT else None
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        **{key: accepted[0] for key, accepted in COMPUTED.items()},
        **{key: getattr(config, ours) for key, ours in SIZES.items()},
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,  # ours has no dropout between softmax and values
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": values[PREFIX + TOKEN].dtype.name,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / CONFIG) as new_config, atomic_write(folder / WEIGHTS) as new_weights:
        save_file(values, new_weights, metadata={"format": "pt"})
        new_config.write_text(to_json(settings, indent=2) + "\n")


class _Named(NamedTuple):
    """What they call a tensor, without prefix, and its shape."""

    name: str
    shape: Shape


def _tensors_of(config: GPTConfig) -> dict[str, _Named]:
    """Return our name -> theirs and the shape, of all parameters of a model."""
    width = config.width
    tensors = {
        "embed.token.weight": _Named(TOKEN, (config.vocab_size, width)),
        "embed.position": _Named("wpe.weight", (config.context, width)),
        "head.norm.gain": _Named("ln_f.weight", (width,)),
        "head.norm.bias": _Named("ln_f.bias", (width,)),
    }
    for i in range(config.num_layers):
        for ours, (theirs, widths) in BLOCK.items():
            tensors[f"block{i}.{ours}"] = _Named(f"h.{i}.{theirs}", tuple(n * width for n in widths))
    return tensors


def _check_sizes(config: GPTConfig, folder: Path) -> None:
    found = config_of(folder)
    differing = [
        f"{name} is {getattr(found, name)} there and {getattr(config, name)} here"
        for name in SIZES.values()
        if getattr(found, name) != getattr(config, name)
    ]
    if differing:
        raise ValueError(f"{folder} holds a model of other sizes: {'; '.join(differing)}")


def _check_params(params: Iterable[Parameter], tensors: dict[str, _Named]) -> None:
    foreign = [f"{p.label} of shape {p.shape}" for p in params if p.shape != tensors.get(p.name, _Named("", ())).shape]
    if foreign:
        raise ValueError(f"the parameters must be of a GPT of this configuration, got {', '.join(foreign)}")


@dataclass(frozen=True)
class _Index:
    """Of weights in several files: a tensor's name -> its file."""

    weight_map: dict[str, str]


class _Stored(NamedTuple):
    """Where a file holds a tensor."""

    path: Path
    start: int  # in bytes
    dtype: str
    shape: Shape

    def read(self) -> Array:
        """Return the values, mapped from the file; bfloat16 as float32."""
        values = np.memmap(self.path, DTYPES[self.dtype], "r", self.start, self.shape)
        return (values.astype("<u4") << 16).view("<f4") if self.dtype == "BF16" else values

    def equals(self, other: _Stored) -> bool:
        return self.dtype in DTYPES and np.array_equal(self.read(), other.read())


def _stored_in(folder: Path) -> dict[str, _Stored]:
    """Return the tensors in a folder by name, of one file or of all that an index names."""
    files = {WEIGHTS}
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(f"{folder} must hold {WEIGHTS} or {INDEX}, and holds neither")
        files = set(_read(folder / INDEX, _Index).weight_map.values())
        for file in files:
            if Path(file).name != file or file in ("", ".."):  # a folder from elsewhere opens no file but its own
                raise ValueError(f"{folder / INDEX} must name files beside it, got {file!r}")
    return {name: tensor for file in sorted(files) for name, tensor in _header(folder / file).items()}


def _header(path: Path) -> dict[str, _Stored]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        with safe_open(path, framework="numpy"):
            pass  # it has held the header against the length of the file; what follows may trust both
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: _Stored(path, 8 + size + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def _read(path: Path, kind: type[T]) -> T:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    return read_json(path, kind)

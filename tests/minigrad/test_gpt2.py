"""GPT-2's files: names, layout, what is refused, and the logits of PyTorch and transformers from the same files.

Run `make test-peers` for the comparison with PyTorch; where transformers is installed, it is compared too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from distributed import LocalWorld
from minigrad import files
from minigrad.backend import Array
from minigrad.models import GPT, GPTConfig, gpt, gpt2
from minigrad.optim import SGD, Optimizer
from pipeline import SCHEDULES, PipelineStage

CONFIG = GPTConfig(vocab_size=11, context=6, num_layers=3, num_heads=2, width=8)
SIZES = {"vocab_size": 11, "n_positions": 6, "n_embd": 8, "n_layer": 3, "n_head": 2}
BATCH = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(2, CONFIG.context))

Tensors = dict[str, Array]


def model_of(seed: int = 0, dtype: Any = np.float32, config: GPTConfig = CONFIG) -> GPT:
    """A GPT none of whose parameters is zero or one."""
    model = GPT(config, dtype=dtype)
    generator = np.random.default_rng(seed)
    for p in model.parameters():
        p.data = p.data + 0.3 * generator.standard_normal(p.shape)
    return model


def their_tensors(model: GPT) -> Tensors:
    """The values of a model under the names that transformers gives them, without the prefix."""
    w = model.state_dict()
    named = {
        "wte.weight": w["embed.token.weight"],
        "wpe.weight": w["embed.position"],
        "ln_f.weight": w["head.norm.gain"],
        "ln_f.bias": w["head.norm.bias"],
    }
    for i in range(model.config.num_layers):
        named |= {
            f"h.{i}.ln_1.weight": w[f"block{i}.norm1.gain"],
            f"h.{i}.ln_1.bias": w[f"block{i}.norm1.bias"],
            f"h.{i}.attn.c_attn.weight": w[f"block{i}.attention.qkv.weight"],
            f"h.{i}.attn.c_attn.bias": w[f"block{i}.attention.qkv.bias"],
            f"h.{i}.attn.c_proj.weight": w[f"block{i}.attention.out.weight"],
            f"h.{i}.attn.c_proj.bias": w[f"block{i}.attention.out.bias"],
            f"h.{i}.ln_2.weight": w[f"block{i}.norm2.gain"],
            f"h.{i}.ln_2.bias": w[f"block{i}.norm2.bias"],
            f"h.{i}.mlp.c_fc.weight": w[f"block{i}.up.weight"],
            f"h.{i}.mlp.c_fc.bias": w[f"block{i}.up.bias"],
            f"h.{i}.mlp.c_proj.weight": w[f"block{i}.down.weight"],
            f"h.{i}.mlp.c_proj.bias": w[f"block{i}.down.bias"],
        }
    return named


def with_prefix(tensors: Tensors) -> Tensors:
    return {f"transformer.{name}": value for name, value in tensors.items()}


def write_config(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **SIZES, **changes}))


def write(folder: Path, tensors: Tensors) -> Path:
    """Make a folder as somebody else would: every value in one file, beside the least of a configuration."""
    write_config(folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: Tensors) -> Path:
    """The same in three files and an index."""
    write_config(folder)
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load_into_new(folder: Path, dtype: Any = np.float32) -> GPT:
    model = model_of(seed=9, dtype=dtype)
    gpt2.load(model.parameters(), CONFIG, folder)
    return model


def refused(folder: Path) -> str:
    """Load, and return why that was refused. Nothing may have changed."""
    model = model_of(seed=9)
    with pytest.raises((ValueError, FileNotFoundError)) as info:
        gpt2.load(model.parameters(), CONFIG, folder)
    assert_same(model.state_dict(), model_of(seed=9).state_dict())
    return str(info.value)


def assert_same(values: Tensors, expected: Tensors) -> None:
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert values[name].dtype == value.dtype
        np.testing.assert_array_equal(values[name], value, err_msg=name)


# -- what is written --------------------------------------------------------------------------


def test_the_written_file_has_their_names_and_our_values(tmp_path: Path) -> None:
    model = model_of()
    gpt2.save(model.parameters(), CONFIG, tmp_path / "new" / "folder")
    path = tmp_path / "new" / "folder" / "model.safetensors"
    assert_same(load_file(path), with_prefix(their_tensors(model)))
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}  # older releases of transformers ask for it


def test_the_written_config_says_what_the_model_computes(tmp_path: Path) -> None:
    gpt2.save(model_of().parameters(), replace(CONFIG, dropout=0.1), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == SIZES | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.0,
        "bos_token_id": None,  # 50256, their default, is no token of this vocabulary
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    assert gpt2.config_of(tmp_path) == CONFIG


def test_the_vocabulary_of_gpt2_has_its_end_of_text(tmp_path: Path) -> None:
    config = GPTConfig(vocab_size=50257, context=1, num_layers=1, num_heads=1, width=1)
    gpt2.save(GPT(config).parameters(), config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 50256


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_a_round_trip_keeps_every_bit_and_the_memory(dtype: str, tmp_path: Path) -> None:
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    model, other = model_of(dtype=dtype), model_of(seed=9, dtype=dtype)
    gpt2.save(model.parameters(), CONFIG, tmp_path)
    Optimizer(other.parameters(), SGD(0.1))
    memory = [p.data for p in other.parameters()]
    gpt2.load(other.parameters(), CONFIG, tmp_path)
    assert_same(other.state_dict(), model.state_dict())
    assert all(p.data is before for p, before in zip(other.parameters(), memory, strict=True))


def test_save_replaces_its_two_files_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("theirs")
    for seed in (0, 1):
        gpt2.save(model_of(seed).parameters(), CONFIG, tmp_path)
    assert_same(load_into_new(tmp_path).state_dict(), model_of(1).state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "config.json", "model.safetensors"}
    assert (tmp_path / "tokenizer.json").read_text() == "theirs"
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "tokenizer.json").stat().st_mode


@pytest.mark.parametrize(("module", "failing"), [(gpt2, "save_file"), (files, "flush")])
def test_a_save_that_fails_leaves_what_was_there(
    module: ModuleType, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2.save(model_of().parameters(), CONFIG, tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, failing, fail)
    with pytest.raises(OSError, match="no space left"):
        gpt2.save(model_of(1).parameters(), replace(CONFIG, dropout=0.5), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert_same(load_into_new(tmp_path).state_dict(), model_of().state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["resid_pdrop"] == 0.0


def test_only_a_whole_model_of_the_configuration_is_saved(tmp_path: Path) -> None:
    params = model_of().parameters()
    with pytest.raises(ValueError, match=r"must be saved whole, .* missing: block0\.norm1\.gain, embed\.token\.weight"):
        gpt2.save([p for p in params if p.name not in ("embed.token.weight", "block0.norm1.gain")], CONFIG, tmp_path)
    with pytest.raises(ValueError, match=r"got 'block2\.norm1\.gain' of shape \(8,\), 'block2\.norm1\.bias'"):
        gpt2.save(params, replace(CONFIG, num_layers=2), tmp_path)
    with pytest.raises(ValueError, match=r"configuration, got 'embed\.position' of shape \(6, 8\)$"):
        gpt2.save(params, replace(CONFIG, context=7), tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize("put", [write, write_shards])
@pytest.mark.parametrize("prefix", [dict, with_prefix])
def test_their_folders_are_read(
    put: Callable[[Path, Tensors], Path], prefix: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    theirs = their_tensors(model_of())
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 6, 6), np.uint8) for i in range(3)}
    masks |= {f"h.{i}.attn.masked_bias": np.full((), -1e4, np.float32) for i in range(3)}
    put(tmp_path, {**prefix(theirs | masks), "lm_head.weight": theirs["wte.weight"]})
    assert_same(load_into_new(tmp_path).state_dict(), model_of().state_dict())


@pytest.mark.parametrize("stored", ["float16", "float64", "bfloat16"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values_take_the_parameters_dtype(stored: str, dtype: Any, tmp_path: Path) -> None:
    stored = pytest.importorskip("ml_dtypes").bfloat16 if stored == "bfloat16" else stored
    rounded = {name: value.astype(stored) for name, value in their_tensors(model_of()).items()}
    write(tmp_path, rounded)
    expected = {name: value.astype(dtype) for name, value in rounded.items()}
    assert_same(their_tensors(load_into_new(tmp_path, dtype)), expected)


def test_bfloat16_is_read_where_numpy_has_none(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in their_tensors(model_of()).items()}
    np.save(tmp_path / "expected.npy", rounded["wte.weight"].astype(np.float32))
    write(tmp_path, rounded)
    program = (
        "import sys, numpy as np; sys.modules['ml_dtypes'] = None\n"
        "from minigrad.models import GPT, gpt2\n"
        "folder = sys.argv[1]; config = gpt2.config_of(folder); model = GPT(config)\n"
        "gpt2.load(model.parameters(), config, folder)\n"
        "assert (model.state_dict()['embed.token.weight'] == np.load(folder + '/expected.npy')).all()"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=Path(__file__).parents[2], timeout=60, check=True)


def test_each_rank_of_a_pipeline_reads_its_own(tmp_path: Path) -> None:
    gpt2.save(model_of().parameters(), CONFIG, tmp_path)
    expected = model_of().state_dict()

    def program(comm: Any) -> set[str]:
        stages = PipelineStage.of(gpt.layers(CONFIG), comm, SCHEDULES["1f1b"], seed=5)
        gpt2.load(stages.parameters(), CONFIG, tmp_path)
        values = {p.name: p.data for p in stages.parameters()}
        assert_same(values, {name: expected[name] for name in values})
        return set(values)

    names = LocalWorld(3).run(program)
    assert set.union(*names) == expected.keys()
    assert "embed.token.weight" in names[0] & names[2]  # tied: both ends read it


def test_what_a_rank_does_not_need_it_does_not_read(tmp_path: Path) -> None:
    theirs = their_tensors(model_of())
    unreadable = {name: np.zeros(3, np.int8) for name in theirs if not name.startswith("h.1.")}
    write(tmp_path, {**theirs, **unreadable, "lm_head.weight": np.zeros(3, np.int8)})
    model = model_of(seed=9)
    block = [p for p in model.parameters() if p.name.startswith("block1.")]
    gpt2.load(block, CONFIG, tmp_path)
    expected = model_of(seed=9).state_dict()
    expected |= {name: value for name, value in model_of().state_dict().items() if name.startswith("block1.")}
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("head", [np.float32, np.float16, np.int8])
def test_a_head_of_its_own_is_refused(head: Any, tmp_path: Path) -> None:
    theirs = their_tensors(model_of())
    own = theirs["wte.weight"].astype(head)
    own[3, 2] += 1
    write(tmp_path, {**with_prefix(theirs), "lm_head.weight": own})
    assert refused(tmp_path).endswith(
        "lm_head.weight must equal transformer.wte.weight, as GPT has one table for both, and differs from it"
    )


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_all_that_is_wrong_is_listed(prefix: str, tmp_path: Path) -> None:
    theirs = {prefix + name: value for name, value in their_tensors(model_of()).items()}
    del theirs[f"{prefix}h.0.ln_1.bias"]
    theirs[f"{prefix}h.1.mlp.c_fc.weight"] = np.ascontiguousarray(theirs[f"{prefix}h.1.mlp.c_fc.weight"].T)
    theirs[f"{prefix}h.2.ln_2.bias"] = np.zeros(8, np.int8)
    theirs[f"{prefix}h.3.attn.bias"] = np.zeros(1, np.uint8)  # a mask of a layer that is not there
    theirs["score.weight"] = np.zeros(2, np.float32)
    expected = [
        f"{tmp_path} does not fit: score.weight is unexpected",
        f"{prefix}h.0.ln_1.bias is missing",
        f"{prefix}h.1.mlp.c_fc.weight must have shape (8, 32), has (32, 8)",
        f"{prefix}h.2.ln_2.bias must have a dtype of F64, F32, F16, BF16, has I8",
    ]
    mask = f"{prefix}h.3.attn.bias is unexpected"
    if prefix:
        expected.insert(1, mask)
    else:
        expected[0] = f"{tmp_path} does not fit: {mask}; score.weight is unexpected"
    assert refused(write(tmp_path, theirs)) == "; ".join(expected)


def test_a_model_of_other_sizes_is_refused(tmp_path: Path) -> None:
    gpt2.save(model_of().parameters(), CONFIG, tmp_path)
    other = replace(CONFIG, context=7, num_heads=4, dropout=0.1)
    with pytest.raises(ValueError, match=r"of other sizes: context is 6 there and 7 here; num_heads is 2 there and 4 "):
        gpt2.load(GPT(other).parameters(), other, tmp_path)
    gpt2.load(model_of().parameters(), replace(CONFIG, dropout=0.1), tmp_path)
    with pytest.raises(ValueError, match=r"configuration, got 'embed\.position' of shape \(7, 8\)$"):
        gpt2.load(GPT(other).parameters(), CONFIG, tmp_path)


@pytest.mark.parametrize("prefix", [with_prefix, dict], ids=["prefix", "no prefix"])
def test_the_one_table_may_be_kept_under_the_name_of_the_head(
    prefix: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    """Of two names of one tensor safetensors' save_model keeps one: transformers#38870."""
    trained = model_of()
    theirs = prefix(their_tensors(trained))
    (name,) = (name for name in theirs if name.endswith("wte.weight"))
    theirs["lm_head.weight"] = theirs.pop(name)
    write(tmp_path, theirs)
    model = GPT(CONFIG, seed=99)
    gpt2.load(model.parameters(), CONFIG, tmp_path)
    assert np.array_equal(model.state_dict()["embed.token.weight"], trained.state_dict()["embed.token.weight"])


# -- files that are damaged or missing -----------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def name_file(folder: Path, name: str) -> None:
    """Let the index look for a tensor in this file, which is there."""
    index = json.loads((folder / gpt2.INDEX).read_text())
    (folder.parent / "elsewhere.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    index["weight_map"]["wte.weight"] = name
    (folder / gpt2.INDEX).write_text(json.dumps(index))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: cut(f / "model-1.safetensors"), "model-1.safetensors is no whole safetensors file: "),
    "text": (
        lambda f: (f / "model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        "model-1.safetensors is no whole safetensors file: ",
    ),
    "empty": (lambda f: (f / "model-1.safetensors").write_bytes(b""), "model-1.safetensors is no whole safetensors "),
    "a shard is gone": (lambda f: (f / "model-1.safetensors").unlink(), "model-1.safetensors is missing"),
    "no weights": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "must hold model.safetensors or model.safetensors.index.json, and holds neither",
    ),
    "no map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "json: Object missing required field `weight_map`",
    ),
    "no files in the map": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": 1}}'),
        "index.json: Expected `str`, got `int` - at `$.weight_map[...]`",
    ),
    "a file elsewhere": (
        lambda f: name_file(f, "../elsewhere.safetensors"),
        "must name files beside it, got '../elsew",
    ),
    "an absolute path": (lambda f: name_file(f, "/etc/passwd"), "must name files beside it, got '/etc/passwd'"),
    "a folder in the map": (lambda f: name_file(f, ".."), "must name files beside it, got '..'"),
    "broken index": (
        lambda f: cut(f / "model.safetensors.index.json"),
        "model.safetensors.index.json cannot be read: ",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "broken config": (lambda f: cut(f / "config.json"), "config.json cannot be read: "),
    "bytes for a config": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\xfd"), "config.json cannot be read: "),
    "a list for a config": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json: Expected `object`, got `array`",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(damage: str, tmp_path: Path) -> None:
    do, message = DAMAGES[damage]
    do(write_shards(tmp_path, their_tensors(model_of())))
    assert message in refused(tmp_path)


# -- config.json ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "n_ctx": 6, "attn_pdrop": 0.1},
        {"activation_function": "gelu_pytorch_tanh", "n_inner": None},
        {"n_inner": 32, "model_type": "gpt2", "task_specific_params": {"text-generation": {"max_length": 50}}},
    ],
)
def test_a_config_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    write_config(tmp_path, **changes)
    assert gpt2.config_of(tmp_path) == CONFIG


def test_the_oldest_configs_are_read(tmp_path: Path) -> None:
    old = {key: value for key, value in SIZES.items() if key != "n_positions"} | {"n_ctx": 6}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert gpt2.config_of(str(tmp_path)) == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gptj"}, "model_type must be 'gpt2', got 'gptj'"),
        ({"activation_function": "gelu"}, "activation_function must be 'gelu_new' or 'gelu_pytorch_tanh', got 'gelu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon must be 1e-05, got 1e-06"),
        ({"scale_attn_weights": False}, "scale_attn_weights must be True, got False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, got True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn must be False, got True"),
        ({"add_cross_attention": True}, "add_cross_attention must be False, got True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings must be True, got False"),
        ({"n_inner": 16}, "n_inner must be 4 n_embd = 32 or null, got 16"),
        ({"n_embd": "8"}, "n_embd must be an integer, got '8'"),
        ({"n_head": True}, "n_head must be an integer, got True"),
        ({"n_positions": None}, "n_positions must be an integer, got None"),
        ({"n_layer": 2**31}, "n_layer must be an integer below 2**31, got 2147483648"),
        ({"activation_function": ["gelu"]}, "must be 'gelu_new' or 'gelu_pytorch_tanh', got ['gelu']"),
        ({"n_layer": 0}, "num_layers must be at least 1, got 0"),
        ({"n_head": 3}, "width must be divisible by num_heads, got 8 and 3"),
        (
            {"model_type": "opt", "vocab_size": None},
            "must be 'gpt2', got 'opt'; vocab_size must be an integer, got None",
        ),
    ],
)
def test_a_config_of_another_computation_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as info:
        gpt2.config_of(tmp_path)
    assert str(info.value).endswith(message)


def test_import_of_minigrad_does_not_load_safetensors() -> None:
    program = "import sys, minigrad.models; assert 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=60, check=True)


# -- the same files in PyTorch and in transformers ---------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch")


def logits_of_torch(torch: ModuleType, w: dict[str, Any], ids: Array) -> Array:
    """GPT-2 on tensors by their names, in PyTorch's own operations."""
    functional = torch.nn.functional

    def conv1d(name: str, x: Any) -> Any:
        return torch.addmm(w[f"{name}.bias"], x.flatten(0, 1), w[f"{name}.weight"]).unflatten(0, x.shape[:2])

    def norm(name: str, x: Any) -> Any:
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    x = w["transformer.wte.weight"][torch.from_numpy(ids)] + w["transformer.wpe.weight"][: ids.shape[1]]
    for i in range(SIZES["n_layer"]):
        h = f"transformer.h.{i}"
        q, k, v = (
            part.unflatten(-1, (SIZES["n_head"], -1)).transpose(1, 2)
            for part in conv1d(f"{h}.attn.c_attn", norm(f"{h}.ln_1", x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + conv1d(f"{h}.attn.c_proj", mixed)
        up = functional.gelu(conv1d(f"{h}.mlp.c_fc", norm(f"{h}.ln_2", x)), approximate="tanh")
        x = x + conv1d(f"{h}.mlp.c_proj", up)
    return (norm("transformer.ln_f", x) @ w["transformer.wte.weight"].T).numpy()


PRECISIONS = [("float32", 1e-5), ("float64", 1e-10)]


@pytest.mark.peers
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_torch_reads_our_file(torch: ModuleType, dtype: str, tolerance: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_tensors

    model = model_of(dtype=dtype)
    gpt2.save(model.parameters(), CONFIG, tmp_path)
    theirs = logits_of_torch(torch, load_tensors(tmp_path / "model.safetensors"), BATCH)
    np.testing.assert_allclose(model(BATCH).data, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.peers
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_we_read_torchs_file(torch: ModuleType, dtype: str, tolerance: float, tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_tensors

    generator = torch.Generator().manual_seed(0)
    w = {
        name: 0.3 * torch.randn(value.shape, generator=generator, dtype=getattr(torch, dtype))
        for name, value in with_prefix(their_tensors(model_of())).items()
    }
    write_config(tmp_path)
    save_tensors(w, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = load_into_new(tmp_path, dtype)(BATCH).data
    np.testing.assert_allclose(ours, logits_of_torch(torch, w, BATCH), rtol=tolerance, atol=tolerance)


@pytest.mark.peers
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_transformers_reads_our_folder(torch: ModuleType, dtype: str, tolerance: float, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(dtype=dtype)
    gpt2.save(model.parameters(), CONFIG, tmp_path)
    peer, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, torch_dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not any(report.values())
    with torch.no_grad():
        theirs = peer.eval()(torch.from_numpy(BATCH)).logits.numpy()
    np.testing.assert_allclose(model(BATCH).data, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.peers
@pytest.mark.parametrize("kwargs", [{}, {"max_shard_size": "2KB"}])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_we_read_the_folder_of_transformers(
    torch: ModuleType, dtype: str, tolerance: float, kwargs: dict[str, str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).to(getattr(torch, dtype)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in peer.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        theirs = peer(torch.from_numpy(BATCH)).logits.numpy()
    peer.save_pretrained(tmp_path, **kwargs)
    assert gpt2.config_of(tmp_path) == CONFIG
    np.testing.assert_allclose(load_into_new(tmp_path, dtype)(BATCH).data, theirs, rtol=tolerance, atol=tolerance)

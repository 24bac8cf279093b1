"""Text that a GPT writes: the cache changes nothing, choices follow the probabilities, and what the command says."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from kernel_modes import use_kernels

from distributed import SoloCommunicator
from distributed.checkpoint import Checkpointer
from minigrad import Tensor, no_grad, profile
from minigrad.generate.__main__ import decode, main, until
from minigrad.kernels import replaced
from minigrad.models import GPT, GPTConfig
from minigrad.models.generation import Reader, Sampling, generate, go_on
from minigrad.nn import KeyValueCache
from minigrad.optim import SGD, Optimizer

CONFIG = GPTConfig(vocab_size=256, context=12, num_layers=2, num_heads=2, width=16, dropout=0.5)


def model_of(dtype=np.float64, scale=4.0):
    model = GPT(CONFIG, seed=3, dtype=dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data * scale  # or every token would be as likely as the next
    return model


def first(count, tokens):
    return list(islice(tokens, count))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_a_cached_forward_has_the_logits_of_a_plain_one(dtype, tolerance):
    model = model_of(dtype, scale=1.0)
    reader, tokens = Reader(model.layers, 12), np.random.default_rng(0).integers(0, 256, 20).tolist()
    model.eval()
    for length in (3, 4, 7, 12, 13, 20):  # several at once too; from 13 on the window is full
        plain = model(np.array([tokens[max(0, length - 12) : length]])).data[0, -1]
        np.testing.assert_allclose(reader.read(tokens[:length]), plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", ["numpy", "numba"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_a_position_in_one_kernel_is_that_of_the_ops(dtype, tolerance, mode, monkeypatch):
    """Of a block that is large enough for kernels, with numbers of all sizes, several texts and odd widths."""
    use_kernels(mode, monkeypatch)
    calls = []
    with replaced("block_step", lambda kernel: lambda *args: calls.append(kernel(*args)) or calls[-1]):
        block = GPT(GPTConfig(context=9, num_layers=1, num_heads=3, width=33), seed=1, dtype=dtype).eval().layers[1]
        generator = np.random.default_rng(0)
        for parameter in block.parameters():
            parameter.data = parameter.data + 0.3 * generator.standard_normal(parameter.shape)
        x, cache = generator.standard_normal((2, 9, 33)).astype(dtype), KeyValueCache(9)
        whole = block(Tensor(x)).data
        with no_grad():
            parts = [block(Tensor(x[:, :4]), cache), *[block(Tensor(x[:, t : t + 1]), cache) for t in range(4, 9)]]
            for part, expected in zip(parts, np.split(whole, [4, 5, 6, 7, 8], axis=1), strict=True):
                assert part.dtype == expected.dtype
                np.testing.assert_allclose(part.data, expected, rtol=tolerance, atol=tolerance)
            with pytest.raises(ValueError, match="room for 9 positions, got 10"):
                block(Tensor(x[:, :1]), cache)
    assert [y is not None for y in calls] == [mode == "numba"] * 5


def test_nan_and_infinity_come_out_of_one_kernel_as_of_the_ops(monkeypatch):
    ends = []
    for mode in ("numpy", "numba"):
        use_kernels(mode, monkeypatch)
        block = GPT(GPTConfig(context=4, num_layers=1, num_heads=3, width=33), seed=1).eval().layers[1]
        for bad in (np.nan, np.inf, 1e30):
            x, cache = np.ones((3, 3, 33), np.float32) * np.arange(33, dtype=np.float32), KeyValueCache(4)
            x[0, 0, 5], x[1, 2, 5] = bad, -bad
            with no_grad(), np.errstate(all="ignore"):
                block(Tensor(x[:, :2]), cache)
                ends.append(np.isfinite(block(Tensor(x[:, 2:]), cache).data))
    np.testing.assert_array_equal(ends[:3], ends[3:])
    assert ends[0][2].all()


def test_a_profile_sees_the_ops_of_a_position():
    model = GPT(GPTConfig(context=4, num_layers=1, num_heads=2, width=40))
    first(1, generate(model, [1]))
    with profile() as seen:
        first(2, generate(model, [1]))
    assert "feed_forward" in str(seen)


def test_with_and_without_a_cache_the_text_is_the_same_past_the_context_too():
    model = model_of()
    assert first(40, generate(model, [5, 6])) == first(40, generate(model, [5, 6], use_cache=False))


def test_a_prompt_longer_than_the_context_counts_by_its_end():
    model, tail = model_of(), list(range(12))
    assert first(5, generate(model, [200, 7, *tail])) == first(5, generate(model, tail))


def test_the_model_is_left_in_training_with_nothing_recorded():
    model = model_of()
    first(3, generate(model, [1]))
    assert model.training
    model.layers[1].eval()  # and so is every part of it
    first(3, generate(model, [1]))
    assert [module.training for module in model.modules()].count(False) == len(list(model.layers[1].modules()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_memory_of_the_caches_is_what_the_docs_say():
    reader = Reader(model_of(np.float32).layers, 12)
    reader.read([1, 2])
    assert sum(cache.nbytes for cache in reader.caches) == 2 * 2 * 12 * 16 * 4


def test_a_full_cache_says_so():
    cache, one = KeyValueCache(2), np.zeros((1, 1, 1, 4))
    cache.extend(one, one)
    cache.extend(one, one)
    with pytest.raises(ValueError, match="room for 2 positions, got 3"):
        cache.extend(one, one)


LOGITS = np.log([0.5, 0.25, 0.15, 0.1])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(temperature=0.5), np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345),
        (Sampling(temperature=1, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(temperature=1, top_p=0.5), [1, 0, 0, 0]),
        (Sampling(temperature=1, top_p=0.51), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(temperature=1, top_k=3, top_p=0.7), [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_probabilities(sampling, expected):
    np.testing.assert_allclose(sampling.probabilities(LOGITS), expected, rtol=1e-12)


def test_tokens_are_drawn_as_often_as_they_are_likely_and_again_the_same():
    sampling = Sampling(temperature=1, seed=4)
    drawn = [sampling.choose(LOGITS, number) for number in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, np.exp(LOGITS), atol=0.03)
    assert drawn[:50] == [sampling.choose(LOGITS, number) for number in range(50)]
    assert drawn[:50] != [Sampling(temperature=1, seed=5).choose(LOGITS, number) for number in range(50)]


def test_temperature_0_takes_the_likeliest():
    assert Sampling(temperature=0).choose(np.array([1.0, 3.0, 2.0]), 0) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0 and finite, got -1"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"seed": -1}, "seed must be from 0"),
    ],
)
def test_a_wrong_value_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)


def test_an_empty_prompt_and_an_unknown_token_are_refused():
    with pytest.raises(ValueError, match="at least one token, got none"):
        next(generate(model_of(), []))
    with pytest.raises(IndexError, match="256"):
        next(generate(model_of(), [256]))


def test_until():
    assert list(until([2, 3], [1, 2, 2, 3, 4])) == [1, 2, 2, 3]
    assert list(until([], [1, 2])) == [1, 2]


def test_letters_are_shown_when_they_are_whole_and_what_a_terminal_would_obey_is_not():
    assert list(decode([[104, 0xC3], [0xA9, 27]], 256)) == ["h", "", "é", "\ufffd", ""]
    assert "".join(decode([[7, 300]], 500)) == "7 300 "


@pytest.fixture
def run(tmp_path):
    """The folder of a run, as far as a reader needs it."""
    model = model_of(np.float32)
    checkpoints = Checkpointer(
        tmp_path / "checkpoints", SoloCommunicator(), model, Optimizer(model.parameters(), SGD(lr=0.1))
    )
    settings = {"vocab": 256, "context": 12, "layers": 2, "heads": 2, "width": 16, "dtype": "float32"}
    checkpoints.load()
    checkpoints.save(1, {"settings": settings})
    checkpoints.wait()
    return tmp_path


def test_the_command_writes_what_the_library_does(run, capsys):
    assert main([str(run), "--prompt", "ab", "--tokens", "9", "--seed", "2", "--top-k", "50"]) == 0
    tokens = [*b"ab", *first(9, generate(model_of(np.float32), b"ab", sampling=Sampling(seed=2, top_k=50)))]
    assert capsys.readouterr().out == "".join(decode([tokens], 256)) + "\n"


def test_a_checkpoint_will_do_for_a_run(run, capsys):
    assert main([str(run), "--tokens", "5"]) == main([str(run / "checkpoints" / "step-00000001"), "--tokens", "5"]) == 0
    text = capsys.readouterr().out
    assert text[: len(text) // 2] == text[len(text) // 2 :]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-p", "2"], "--top-p must be above 0 and at most 1, got 2.0"),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be at least 0 and finite, got -1.0"),
        (["--seed", "-1"], "--seed must be from 0 to 2**64 - 1, got -1"),
        (["--prompt", ""], "a prompt needs at least one token, got ''"),
        (["--tokens", "-1"], "--tokens must be at least 0, got -1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, flags, message, capsys):
    assert main([str(run), *flags]) == 2
    assert capsys.readouterr().err == f"python -m minigrad.generate: {message}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--top-k x", "--top-k must be an integer, got 'x'"),
        ("--top-p x", "--top-p must be a number, got 'x'"),
        ("--what", "unrecognized arguments: --what"),
    ],
)
def test_a_flag_that_cannot_be_read_is_one_line_too(flags, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["folder", *flags.split()])
    assert capsys.readouterr().err == f"python -m minigrad.generate: {message}\n"


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert f"got {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["text", [1.5], [None]])
def test_a_prompt_that_is_no_tokens_is_named(prompt: Any) -> None:
    # 1.5 was taken for 1.
    with pytest.raises(TypeError, match=r"a prompt is bytes, as text.encode\(\) gives, or the numbers of tokens, got "):
        next(go_on(lambda tokens: np.zeros(3), prompt, Sampling()))

"""The verifier: it accepts what equals one process, and names what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import needs_mpirun, run_job

import minigrad as mg
from distributed import GradientBucketManager, LocalWorld
from minigrad import nn
from minigrad.models import gpt, mlp
from pipeline.__main__ import main
from pipeline.cli import verify as verify_command
from pipeline.runtime.local_stages import LocalStages
from pipeline.runtime.stage import PipelineStage
from pipeline.verify import Case, MismatchError, verify

CONFIG = gpt.GPTConfig(vocab_size=17, context=6, num_layers=4, num_heads=2, width=8, dropout=0.1)
GENERATOR = np.random.default_rng(0)
IDS = [GENERATOR.integers(0, 17, (9, 7)) for _ in range(3)]
GPT_CASE = Case(gpt.layers(CONFIG), [(ids[:, :-1], ids[:, 1:]) for ids in IDS], mg.cross_entropy, max_norm=0.5)
MLP_CASE = Case(
    mlp.layers([5, 7, 6, 3], dropout=0.2),
    [(GENERATOR.standard_normal((8, 5)), GENERATOR.integers(0, 3, 8)) for _ in range(2)],
    mg.cross_entropy,
)


@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", [GPT_CASE, MLP_CASE], ids=["gpt", "mlp"])
def test_what_equals_one_process_is_accepted(case: Case, schedule: str, dp: int, pp: int) -> None:
    report = verify(case, dp=dp, pp=pp, schedule=schedule, num_microbatches=3)
    assert report.largest_difference < case.rtol
    assert report.num_steps == len(case.batches)
    assert str(report).startswith(f"dp={dp} pp={pp} {schedule} micro-batches=3: {report.num_steps} steps, ")


@pytest.mark.parametrize("schedule", ["v_min", "v_half", "dualpipev", "dualpipev_overlap"])
def test_the_v_schedules_train_as_one_process_with_replicas_and_tied_weights(schedule: str) -> None:
    report = verify(GPT_CASE, dp=2, pp=2, schedule=schedule, num_microbatches=4)
    assert report.largest_difference < GPT_CASE.rtol


@pytest.mark.ranks(4)
def test_on_the_ranks_of_a_communicator(ranks: Any) -> None:
    reports = ranks.run(lambda comm: verify(GPT_CASE, dp=2, pp=2, num_microbatches=2, comm=comm))
    assert all(report.largest_difference < GPT_CASE.rtol for report in reports)


def expect(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any], message: str) -> None:
    """Break a method and require the message, on all ranks alike."""
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    errors: list[str] = []

    def program(comm: Any) -> None:
        with pytest.raises(MismatchError, match=message) as caught:
            verify(GPT_CASE, dp=2, pp=2, num_microbatches=3, comm=comm)
        errors.append(str(caught.value))

    LocalWorld(4).run(program)
    assert len(errors) == 4
    assert len(set(errors)) == 1


def test_a_wrong_micro_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backward: Any) -> Any:
        def zeros_for_the_last(self: Any, microbatch: int, cotangent: Any, hooks: Any) -> Any:
            if microbatch == 2 and self.is_first:
                cotangent = np.zeros_like(cotangent)
            return backward(self, microbatch, cotangent, hooks)

        return zeros_for_the_last

    message = (
        r"^\[rank 0\] dp 0, pp 0: step 1: the gradient of 'embed.position' differs by .*, on stage 0; "
        "the part of micro-batch 2 is the first wrong one$"
    )
    expect(monkeypatch, PipelineStage, "backward_steps", broken, message)


def test_a_wrong_reduction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(start: Any) -> Any:
        return lambda self, reached, share, is_even: start(self, reached, share * (1 + self.comm.rank / 100))

    message = r"^\[rank 0\] .*step 1: the gradient of 'embed.position' .*micro-batches are right, so their reduction"
    expect(monkeypatch, GradientBucketManager, "start", broken, message)


def test_a_loss_that_is_no_mean_is_named() -> None:
    """It was the fault of a reduction over ranks, where none is."""
    case = Case(mlp.layers([5, 7, 3]), MLP_CASE.batches, lambda output, y: mg.cross_entropy(output, y, reduction="sum"))
    with pytest.raises(MismatchError, match="in one process too micro-batches do not add up to it: the loss must be"):
        verify(case, pp=2, num_microbatches=2)


def test_a_tied_parameter_that_is_not_summed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^\[rank 0\] .*step 1: the gradient of 'embed.token.weight' .*, where it is one of several copies$"
    expect(monkeypatch, LocalStages, "sum_tied", lambda sum_tied: lambda self, before: None, message)


def test_a_wrong_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.runtime import executor

    def broken(loss: Any) -> Any:
        return property(lambda self: 2 * loss.fget(self))

    message = r"^\[rank 0\] dp 0, pp 0: step 1: the loss differs by 1\.0e\+00$"
    expect(monkeypatch, executor.PipelineOutput, "loss", broken, message)


def test_something_that_is_not_finite_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.runtime import executor

    message = r"^\[rank 0\] dp 0, pp 0: step 1: the loss differs by nan$"
    expect(monkeypatch, executor.PipelineOutput, "loss", lambda loss: property(lambda self: float("nan")), message)


def test_a_case_that_is_not_finite_in_one_process_is_an_error() -> None:
    """Its micro-batch 0 was said to be the first wrong one, of a layout with no fault."""
    x, y = MLP_CASE.batches[0]
    case = Case(MLP_CASE.layers, [(np.where(x > 1, np.nan, x), y)], mg.cross_entropy)
    with pytest.raises(ValueError, match=r"^step 1 in one process: loss nan, norm of the gradient nan$"):
        verify(case, pp=2, num_microbatches=2)


def test_a_report_says_what_was_sharded() -> None:
    said = [str(verify(MLP_CASE, dp=2, num_microbatches=2, zero=zero)).partition(":")[0] for zero in (0, 2)]
    assert said == ["dp=2 pp=1 1f1b micro-batches=2", "dp=2 pp=1 1f1b micro-batches=2 zero=2"]


# -- the command --------------------------------------------------------------------------


def test_the_command_verifies_the_models_that_come_along(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "mlp", "--pp", "2", "--schedule", "zero_bubble_h1"]) == 0
    assert capsys.readouterr().out.startswith("dp=1 pp=2 zero_bubble_h1 micro-batches=4: 3 steps, 16 gradients each, ")


def test_the_command_takes_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_model.py").write_text(
        "from test_verify import MLP_CASE as case\nmine = lambda: case\nnone = lambda: 1\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "my_model:mine", "--dp", "2", "--pp", "1", "--microbatches", "2"]) == 0
    assert "equal to one process" in capsys.readouterr().out
    for model, rule in [
        ("my_model:none", "my_model:none must return a pipeline.verify.Case, got int"),
        ("my_model:gone", "the model 'my_model:gone' cannot be found: "),
    ]:
        assert main(["verify", model]) == 2
        assert capsys.readouterr().err.startswith(f"python -m pipeline: {rule}")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("cnn", ": the model must be gpt or mlp, or MODULE:FUNCTION, got 'cnn'"),
        (":mine", ": the model must be gpt or mlp, or MODULE:FUNCTION, got ':mine'"),
        (".a:mine", ": the model must be gpt or mlp, or MODULE:FUNCTION, got '.a:mine'"),
        ("math:pi", ": math:pi must be a function, got float"),
        ("mlp --schedule 2f2b --pp 2", ": schedule must be one of gpipe, 1f1b, interleaved_1f1b, looped_bfs, "),
        ("mlp --schedule forward_only", ": schedule must be one of gpipe, 1f1b, interleaved_1f1b, looped_bfs, "),
        ("mlp --schedule gone.csv", ": gone.csv cannot be read: No such file or directory"),
        ("mlp --dp 0", " verify: argument --dp: must be a whole number of at least 1, got '0'"),
        ("mlp --pp two", " verify: argument --pp: must be a whole number of at least 1, got 'two'"),
        ("mlp --microbatches -1", " verify: argument --microbatches: must be a whole number of at least 1, got '-1'"),
        (
            "mlp --schedule zbv --pp 5",
            ": --pp 5 makes 10 stages under zbv, which must be at most the layers of the model, embedding and "
            "head not counted, got 8",
        ),
        (
            "gpt --pp 9",
            ": --pp 9 makes 9 stages under 1f1b, which must be at most the layers of the model, embedding and "
            "head not counted, got 8",
        ),
        (
            "mlp --dp 5 --microbatches 5",
            ": --dp times --microbatches must be at most 24, the samples of a batch, got 5 x 5",
        ),
        ("mlp --microbatches 25", ": --microbatches must be at most 24, the samples of a batch, got 25"),
        (
            "mlp --schedule interleaved_1f1b --microbatches 3",
            ": interleaved 1F1B needs --microbatches divisible by the number of ranks, got 3 and 2",
        ),
    ],
)
def test_the_command_says_which_option_is_wrong(
    options: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_command, "verify", None)  # it says so before any work
    status: object
    try:
        status = main(["verify", *options.split()])
    except SystemExit as exit_:  # argparse leaves in its own way
        status = exit_.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith(f"python -m pipeline{line}")
    assert error.count("\n") == 1


def test_every_sample_may_be_a_micro_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        verify_command, "verify", lambda case, **layout: f"{layout['dp']} x {layout['num_microbatches']}"
    )
    assert main(["verify", "mlp", "--pp", "8", "--dp", "4", "--microbatches", "6"]) == 0  # 24 samples, 8 layers
    assert capsys.readouterr().out == "4 x 6\n"


def test_the_command_says_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(LocalStages, "sum_tied", lambda self, before: None)
    with pytest.raises(SystemExit) as stop:
        main(["verify", "gpt", "--dp", "1", "--pp", "2", "--microbatches", "2"])
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("not equal to one process: [rank 0] dp 0, pp 0: step 1: the gradient of")


@pytest.mark.parametrize("zero", [1, 2])
def test_the_command_takes_shards(capsys: pytest.CaptureFixture[str], zero: int) -> None:
    assert main(["verify", "mlp", "--pp", "1", "--dp", "3", "--zero", str(zero)]) == 0
    assert "equal to one process" in capsys.readouterr().out


@needs_mpirun
def test_the_command_under_mpirun() -> None:
    result = run_job(["-m", "mpi4py", "-m", "pipeline", "verify", "mlp", "--dp", "2", "--pp", "1"], ranks=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("equal to one process") == 1


class Attention(nn.Module):
    """Queries, keys and values from layers of their own: the gradient of the keys' bias is zero but for rounding."""

    def __init__(self, param: nn.ParamGetter) -> None:
        self.query, self.key, self.value = (nn.Linear(param.at(name), 8, 8) for name in ("query", "key", "value"))

    def __call__(self, x: Any) -> mg.Tensor:
        return mg.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def attention_case(*, dtype: Any = np.float64, rtol: float = 1e-10) -> Case:
    generator = np.random.default_rng(3)
    points = generator.standard_normal((2, 2, 6, 5, 8)).astype(dtype)
    batches = [(x, y) for x, y in points]
    layers = [(f"a{i}", lambda param, i=i: Attention(param.at(f"a{i}"))) for i in range(4)]
    return Case(layers, batches, mg.mse, dtype=dtype, rtol=rtol)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(dtype: Any) -> None:
    report = verify(
        attention_case(dtype=dtype, rtol=1e-10 if dtype == np.float64 else 1e-4), dp=2, pp=2, num_microbatches=2
    )
    assert report.largest_difference < (1e-10 if dtype == np.float64 else 1e-4)


def test_a_small_fault_in_a_gradient_that_is_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(backward: Any) -> Any:
        def adds_a_little(self: Any, *args: Any) -> Any:
            result = yield from backward(self, *args)
            for name, p in self.named_parameters():
                if name.endswith("a0.key.bias"):
                    p.grad[...] += 1e-12
            return result

        return adds_a_little

    monkeypatch.setattr(PipelineStage, "backward_steps", faulty(PipelineStage.backward_steps))
    with pytest.raises(MismatchError, match=r"the gradient of 'a0\.key\.bias' differs"):
        verify(attention_case(), pp=2, num_microbatches=2)


def test_a_case_without_a_batch_is_refused() -> None:
    """The report looked for the parameters of the first step."""
    with pytest.raises(ValueError, match="a case must have a batch to train on, got none"):
        verify(Case(mlp.layers([4, 4, 4]), [], mg.cross_entropy), pp=2)

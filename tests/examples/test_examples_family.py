"""The family of small example scripts, each run as its first line says, small; and what their texts promise."""

import ast
import difflib
import functools
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from jobs import LIGHTLY, ROOT, metrics_of, needs_mpirun, run_job, write_text

import custom_comm_hook
import custom_op
import custom_schedule
import gpt_hybrid
import gpt_pipeline
import schedule_from_csv
from common import settings as flags
from common.digits import load_digits
from common.proof import proved
from distributed import GradientBucketManager, LocalWorld
from distributed.run import check
from minigrad import check_vjp
from pipeline import SCHEDULES, Action, Schedule, ScheduleError, draw, load

EXAMPLES = ROOT / "examples"
SETTINGS = {
    "mlp_digits": flags.DigitsSettings,
    "gpt_single": flags.GPTSingleSettings,
    "gpt_ddp": flags.GPTReplicaSettings,
    "gpt_local_steps": flags.LocalStepsSettings,
    "gpt_pipeline": flags.ScheduleSettings,
    "gpt_hybrid": flags.HybridSettings,
    "schedule_from_csv": schedule_from_csv.FileSettings,
    "custom_op": flags.DigitsSettings,
    "custom_schedule": flags.PipelineSettings,
    "custom_comm_hook": custom_comm_hook.HookSettings,
}
ON_TEXT = [name for name, kind in SETTINGS.items() if issubclass(kind, flags.GPTSettings)]
ON_DIGITS = [name for name in SETTINGS if name not in ON_TEXT]
ON_TEXT.remove("gpt_local_steps")  # its ranks go ways of their own: see test_gpt_local_steps.py
SMALL_TEXT = shlex.split(
    "--steps 6 --seed 1 --lr 0.01 --batch 16 --layers 2 --heads 2 --width 16 --context 16 --dtype float64"
)
SMALL_DIGITS = shlex.split("--steps 60 --lr 0.01 --hidden 64 --save-every 30")


def script(name: str) -> str:
    return str(EXAMPLES / f"{name}.py")


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(folder)]


def run_as_its_first_line_says(name: str, small: list[str], cwd: Path) -> tuple[Path, str]:
    """Run the command that the script begins with, but for its pictures; return its folder and what it printed."""
    line = Path(script(name)).read_text().splitlines()[0]
    command = re.fullmatch(rf"# (?:mpirun -n (\d) )?python (-m mpi4py )?examples/{name}\.py ?(.*)", line)
    assert command is not None, line
    ranks, with_mpi, given = command.groups()
    assert (ranks is None) == (with_mpi is None)
    start = [*(["-m", "mpi4py"] if with_mpi else []), LIGHTLY]
    arguments = [*start, name, *shlex.split(given), *small, "--run", name]
    result = run_job(arguments, ranks=None if ranks is None else int(ranks), cwd=cwd)
    assert result.returncode == 0, result.stderr
    return cwd / name, result.stdout


# -- what they do -------------------------------------------------------------------------------


Runs = Callable[[str], tuple[Path, str]]


@pytest.fixture(scope="module")
def text_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each script's folder and what it printed; run when it is first asked for."""
    cwd = tmp_path_factory.mktemp("text")
    small = [*SMALL_TEXT, "--text", str(write_text(cwd))]
    return functools.cache(lambda name: run_as_its_first_line_says(name, small, cwd))


def long_but(names: list[str], quick: list[str]) -> list[Any]:
    """Mark the scripts that `make test` leaves out."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]


@needs_mpirun
@pytest.mark.parametrize("name", long_but(ON_TEXT, ["gpt_single", "gpt_ddp", "schedule_from_csv"]))
def test_gpts_learn_the_same_in_every_layout(name: str, text_runs: Runs) -> None:
    losses = losses_of(text_runs(name)[0])
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    np.testing.assert_allclose(losses, losses_of(text_runs("gpt_single")[0]), rtol=1e-9)


@needs_mpirun
def test_replicas_without_a_pipeline_have_a_timeline(text_runs: Runs) -> None:
    folder, printed = text_runs("gpt_ddp")
    assert "buckets were there when the backward ended" in printed
    page = (folder / "timeline.svg").read_text()
    words = ("step 6 of 6", "rank 0", "rank 1", "backward", "bucket under way")
    assert all(f">{each}</text>" in page for each in words)
    events = [
        event for event in json.loads((folder / "timeline.json").read_text())["traceEvents"] if event["ph"] == "X"
    ]
    for rank in range(2):
        mine = {event["name"] for event in events if event["pid"] == rank}
        assert mine >= {"forward", "backward", "buckets", "optimizer"}
    assert "predicted" not in page


@needs_mpirun
@pytest.mark.parametrize("name", long_but(["schedule_from_csv", "custom_schedule"], ["schedule_from_csv"]))
def test_schedules_of_ones_own_are_drawn_before_the_run_and_timed_in_it(name: str, text_runs: Runs) -> None:
    folder, printed = text_runs(name)
    schedule, bubble = {
        "schedule_from_csv": (load(EXAMPLES / "schedules" / "split_on_last_rank.csv"), "the bubble is 8.3% "),
        "custom_schedule": (EAGER, "eager_1f1b: a bubble of 25.0% of the ideal time, 41.7% with slow messages"),
    }[name]
    drawing = draw(proved(schedule, flags.PipelineSettings(), 2))
    assert printed.index(drawing) < printed.index(bubble) < printed.index("6 steps in")
    assert "predicted, from the median time" in (folder / "timeline.svg").read_text()


@pytest.fixture(scope="module")
def digits_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cwd = tmp_path_factory.mktemp("digits")
    return functools.cache(lambda name: run_as_its_first_line_says(name, SMALL_DIGITS, cwd))


@needs_mpirun
@pytest.mark.parametrize("name", long_but(ON_DIGITS, ["mlp_digits"]))
def test_networks_learn_digits(name: str, digits_runs: Runs) -> None:
    folder, printed = digits_runs(name)
    assert [line["step"] for line in metrics_of(folder)] == list(range(60))
    losses = losses_of(folder)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    saved = json.loads((folder / "settings.json").read_text())
    assert saved["script"] == name
    assert saved["settings"] | {"steps": 60, "hidden": 64, "batch": 48} == saved["settings"]
    assert json.loads((folder / "summary.json").read_text())["validation_accuracy"] > 0.4
    assert re.search(r"reads \d\d\.\d% right of 360 digits that it never saw", printed)


@pytest.mark.long
@needs_mpirun
def test_one_process_goes_on_as_two_ranks_did(digits_runs: Runs, tmp_path: Path) -> None:
    for more in ([*SMALL_DIGITS, "--steps", "30"], ["--resume", "auto", "--steps", "60"]):
        result = run_job([LIGHTLY, "mlp_digits", *more, "--run", "here"], ranks=None, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert "goes on after step 30" in result.stdout
    losses = losses_of(tmp_path / "here")
    assert len(losses) == 60
    np.testing.assert_allclose(losses, losses_of(digits_runs("mlp_digits")[0]), rtol=1e-4)  # float32


@pytest.mark.long
@needs_mpirun
def test_the_comm_hook_sends_a_fiftieth(digits_runs: Runs) -> None:
    sent, plain = re.findall(r"[\d,]+(?= bytes)|(?<=all of them are )[\d,]+", digits_runs("custom_comm_hook")[1])
    assert 45 < int(plain.replace(",", "")) / int(sent.replace(",", "")) < 55


@pytest.mark.parametrize("script_module", [gpt_pipeline, gpt_hybrid])
def test_schedule_and_microbatches_reach_the_executor(
    script_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def executor(stages: Any, comm: Any, schedule: Schedule, **more: Any) -> None:
        raise RuntimeError(schedule.name, more["num_microbatches"])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", *SMALL_TEXT, "--schedule", "gpipe", "--microbatches", "3"])
    monkeypatch.setattr(script_module, "PipelineExecutor", executor)
    with pytest.raises(RuntimeError, match=r"^\('gpipe', 3\)$"):
        script_module.main()


# -- what they say ------------------------------------------------------------------------------


def run_here(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in this process, as Python does."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # set anyway by the script, which would not set it back
    monkeypatch.setattr(sys, "argv", [script(name), *arguments])
    runpy.run_path(script(name), run_name="__main__")


@pytest.mark.parametrize("name", SETTINGS)
def test_help_teaches_and_lists_every_flag_once(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run_here(name, ["--help"], monkeypatch)
    output = capsys.readouterr().out
    text = ast.get_docstring(ast.parse(Path(script(name)).read_text()))
    assert text is not None
    assert text in output
    assert Path(script(name)).read_text().splitlines()[0][2:] in text  # the command that it begins with
    listed = re.findall(r"^  (--[a-z-]+)", output, re.MULTILINE)
    assert listed == [f"--{f.name.replace('_', '-')}" for f in fields(SETTINGS[name])]


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        *((name, "--steps 0", "--steps must be at least 1, got 0") for name in SETTINGS),
        ("mlp_digits", "--hidden 0", "--hidden must be at least 1, got 0"),
        (
            "gpt_single",
            "--text gone",
            "--text: tokens must be a file or directory that can be read, got gone: No such .*",
        ),
        (
            "gpt_ddp",
            "--context 999999",
            "the text must give at least 1000000 tokens .* for --context 999999 times 1, got .*",
        ),
        ("gpt_local_steps", "--every 0", "--every must be at least 1, got 0"),
        ("gpt_local_steps", "--every 9 --fragments 2", "--every must be a multiple of --fragments, got 9 and 2"),
        (
            "gpt_local_steps",
            "--every 10 --fragments 5",
            "--fragments must be at most the blocks of the model, got 5 for --layers 4",
        ),
        (
            "gpt_local_steps",
            "--every 6 --fragments 2 --delay 3",
            "--delay must be below the 3 steps from one fragment to the next, got 3",
        ),
        ("gpt_local_steps", "--alpha 1.5", "--alpha must be at most 1, got 1.5"),
        ("gpt_local_steps", "--outer-lr 0", "--outer-lr must be above 0, got 0.0"),
        ("gpt_hybrid", "--dp 2", "dp \\* pp must equal the number of ranks, got dp=2, pp=1 and 1 rank; mpirun -n 2 .*"),
        ("schedule_from_csv", "--schedule-file gone", "--schedule-file must be a file that can be read, got gone: .*"),
        (
            "schedule_from_csv",
            "--microbatches 3",
            "split_on_last_rank.csv is written for 2 ranks and 4 micro-batches, got 1 and 3",
        ),
        ("schedule_from_csv", "--batch 3", "--batch must hold a sample for each of 4 micro-batches, got 3"),
        ("custom_schedule", "--microbatches 49", "--batch must hold a sample for each of 49 micro-batches, got 48"),
    ],
)
def test_a_wrong_flag_is_one_line_before_any_work(
    name: str,
    arguments: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        run_here(name, arguments.split(), monkeypatch)
    printed, error = capsys.readouterr()
    assert re.fullmatch(rf"{name}\.py: {line}\n", error), error
    assert printed == ""
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_is_shown_with_the_cell_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.csv").write_text("0F0, 0F1, 0BW0, 0BW1\n1F0, 1BW1, 1F1, 1BW0\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        run_here("schedule_from_csv", ["--schedule-file", str(tmp_path / "mine.csv")], monkeypatch)
    assert capsys.readouterr().err.splitlines() == [
        "schedule_from_csv.py: mine.csv: F comes before B before W of a micro-batch, "
        "got 1BW1 on rank 1 with no 1F1 before it",
        "rank 0  0F0   0F1   0BW0  0BW1",
        "rank 1  1F0  [1BW1] 1F1   1BW0 <-- here",
    ]


# -- how they are written -----------------------------------------------------------------------


def main_of(name: str) -> list[str]:
    source = Path(script(name)).read_text()
    (main,) = (f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == "main")
    return [line.strip() for line in (ast.get_source_segment(source, main) or "").splitlines()]  # a `with` is one line


@pytest.mark.parametrize(
    ("first", "second", "most"),
    [
        ("mlp_digits", "gpt_single", 36),
        ("gpt_single", "gpt_ddp", 13),
        ("gpt_ddp", "gpt_local_steps", 26),
        ("gpt_single", "gpt_pipeline", 15),
        ("gpt_pipeline", "gpt_hybrid", 17),
        ("gpt_pipeline", "schedule_from_csv", 11),
        ("gpt_pipeline", "custom_schedule", 14),
        ("mlp_digits", "custom_op", 5),
        ("mlp_digits", "custom_comm_hook", 9),
    ],
)
def test_a_script_names_the_one_that_it_differs_from_by_few_lines(first: str, second: str, most: int) -> None:
    assert f"{first}.py with" in Path(script(second)).read_text()
    changed = [line for line in difflib.ndiff(main_of(first), main_of(second)) if line[0] in "-+"]
    assert len(changed) <= most


# -- their parts --------------------------------------------------------------------------------

EAGER = Schedule("eager_1f1b", custom_schedule.eager_one_f_one_b)


def test_digits_are_split_alike_every_time() -> None:
    train, validation = load_digits()
    assert train.x.shape == (1437, 64)
    assert validation.x.shape == (360, 64)
    assert (train.x.min(), train.x.max()) == (0, 1)
    assert validation.y[:10].tolist() == [2, 4, 5, 4, 8, 2, 0, 6, 3, 3]
    assert len(np.unique(np.concatenate([train.x, validation.x]), axis=0)) == 1797  # none is in both


def test_scikit_learn_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r"^this script, whose digits come with it, needs scikit-learn: pip install "):
        load_digits()


def test_the_vjp_of_the_op() -> None:
    x = np.array([[-2.0, 3.0], [0.5, -1.0]])
    np.testing.assert_array_equal(custom_op.squared_relu(x).data, [[0, 9], [0.25, 0]])
    check_vjp(custom_op.squared_relu, x)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_eager_1f1b_is_proved_and_hides_messages(num_ranks: int) -> None:
    settings = flags.PipelineSettings(microbatches=8)
    for latency in (0.0, 0.5, 1.0):
        plain, eager = (proved(each, settings, num_ranks, latency=latency) for each in (SCHEDULES["1f1b"], EAGER))
        if latency and num_ranks > 1:
            assert eager.makespan < plain.makespan
        else:
            assert eager.makespan == plain.makespan
        assert eager.peak_microbatches == [min(8, 2 * (num_ranks - rank) - 1) for rank in range(num_ranks)]


def test_a_function_that_makes_no_schedule_is_refused() -> None:
    def backwards(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
        return EAGER.order(rank, num_ranks, num_microbatches)[::-1]

    with pytest.raises(ScheduleError, match=r"F comes before B(.|\n)*rank 0 \[0BW3\] 0BW2 .* <-- here"):
        proved(Schedule("backwards", backwards), flags.PipelineSettings(), 2)


def test_the_file_is_as_good_as_zero_bubble_h1() -> None:
    schedule = load(EXAMPLES / "schedules" / "split_on_last_rank.csv")
    settings = flags.PipelineSettings()
    timeline = proved(schedule, settings, 2)
    named = {name: proved(each, settings, 2) for name, each in SCHEDULES.items()}
    assert timeline.rows not in [each.rows for each in named.values()]
    assert timeline.makespan == named["zero_bubble_h1"].makespan
    assert timeline.bubble_fraction == pytest.approx(named["1f1b"].bubble_fraction / 3)
    assert timeline.peak_microbatches == named["1f1b"].peak_microbatches


def buckets_of(hook: Any, comm: Any, sizes: list[int]) -> list[np.ndarray]:
    """Return the gradients of buckets of these sizes, known to the hook."""
    params = [(f"p{i}", size, np.float32) for i, size in enumerate(sizes)]
    manager = GradientBucketManager(params, comm, bucket_bytes=1)  # a bucket each
    hook.attach(manager)
    return [bucket.range.grad for bucket in manager.buckets]


def test_what_the_comm_hook_keeps_gets_through_later() -> None:
    grads = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)

    def program(comm: Any, forget: bool, num_steps: int) -> tuple[np.ndarray, int]:
        hook = custom_comm_hook.LargestOnly(0.1, forget=forget)
        (place,) = buckets_of(hook, comm, [20])
        total = np.zeros(20, np.float32)
        for _ in range(num_steps):
            place[:] = grads[comm.rank]
            total += hook(place, comm).wait()
        return total, hook.sent_bytes

    for forget in (False, True):
        (total, sent), *others = LocalWorld(3).run(program, forget, 200)
        assert sent == 200 * 2 * (4 + 4)
        for other, _ in others:
            np.testing.assert_array_equal(other, total)  # the same bits
        error = np.abs(total / 200 - grads.sum(axis=0)).max()
        assert (error > 0.5) if forget else (error < 0.1)


def test_each_bucket_keeps_its_own() -> None:
    def program(comm: Any) -> list[list[float]]:
        hook = custom_comm_hook.LargestOnly(0.5, forget=False)
        first, second = buckets_of(hook, comm, [2, 2])
        sums = []
        for _ in range(2):
            first[:], second[:] = (3, 2), (30, 20)
            sums += [hook(bucket, comm).wait().tolist() for bucket in (first, second)]
        return sums

    assert LocalWorld(2).run(program)[0] == [[6, 0], [60, 0], [0, 8], [0, 80]]


@pytest.mark.parametrize(
    ("settings", "world_size", "rule"),
    [
        (flags.GPTSingleSettings(), 2, "this script is for one process, got 2 ranks"),
        (flags.GPTReplicaSettings(batch=2), 3, "--batch must hold a sample for each of 3 ranks, got 2"),
        (flags.ScheduleSettings(microbatches=0), 2, "--microbatches must be at least 1, got 0"),
        (
            flags.ScheduleSettings(schedule="zbv"),
            3,
            "--layers must give each stage a block, got 4 for the 6 stages of zbv on 3 ranks",
        ),
        (
            flags.HybridSettings(dp=2, pp=2, schedule="interleaved_1f1b", microbatches=3),
            4,
            "interleaved 1F1B needs --microbatches divisible by the pipeline's ranks, got 3 and 2",
        ),
    ],
)
def test_broken_rules_are_named_with_their_values(settings: flags.RunSettings, world_size: int, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        check(settings, world_size)


def test_a_replica_without_a_pipeline_is_cut_only_where_asked() -> None:
    check(flags.HybridSettings(dp=2, batch=2), 2)
    with pytest.raises(ValueError, match="--batch must hold a sample for each of 4 micro-batches, got 2"):
        check(flags.HybridSettings(dp=2, batch=2, microbatches=4), 2)

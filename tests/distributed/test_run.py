"""A run as its folder tells it: metrics, checkpoints, summary, plots; ended early and gone on with."""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import fill_disk_at

from distributed import Communicator, LocalWorld, SoloCommunicator
from distributed.data.batches import Sampler
from distributed.run import RunSettings
from distributed.run import folder as run_folder
from distributed.run import run as run_module
from distributed.run.folder import RunFolder
from distributed.run.run import Run
from distributed.run.summary import summarize
from distributed.stop import StopRequest
from minigrad import backward
from minigrad.nn import Linear, ParamGetter
from minigrad.optim import SGD, Optimizer

NUM_STEPS = 6


draw_plots = run_folder.draw_plots


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, which take most of a small run's time, are drawn where they are looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "draw_plots", lambda *_, **__: [])


def train(settings: RunSettings, comm: Communicator | None = None, *, stop_at: int = -1, bad_loss: bool = False) -> Run:
    """Fit a line, one sample a step; ask for an early end in the step `stop_at`."""
    comm = comm or SoloCommunicator()
    model = Linear(ParamGetter(dtype=np.float64), 2, 1)
    optimizer = Optimizer(model.parameters(), SGD(lambda step: 0.1 / (1 + step), momentum=0.9))
    sampler = Sampler(5, batch_size=settings.batch, seed=settings.seed)
    run = Run(settings, comm)
    for step in run.steps(model, optimizer, sampler):
        x = np.array([[sampler.next()[0] / 5, 1.0]])
        optimizer.zero_grad()
        loss = ((model(x) - 3 * x[:, :1]) ** 2).mean()
        backward(loss)
        optimizer.step()
        run.log(float("nan") if bad_loss else loss.item(), rows=float(x[0, 0]))
        if step == stop_at:
            run_module.signal_of_the_test()  # type: ignore[attr-defined]
    if not run.stopped:
        run.end(accuracy=0.5)
    return run


@pytest.fixture(autouse=True)
def stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run's stop request be asked as a signal would ask it."""

    class Remembered(StopRequest):
        def __enter__(self) -> StopRequest:
            monkeypatch.setattr(run_module, "signal_of_the_test", self.request, raising=False)
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(run_module, "StopRequest", Remembered)


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


SETTINGS = RunSettings(steps=NUM_STEPS, batch=1, run="run", save_every=2, keep=2, quiet=True)


def test_a_run_leaves_all_that_it_says(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "draw_plots", draw_plots)
    run = train(replace(SETTINGS, run=None, quiet=False))
    assert run.folder.parent == Path("runs")
    names = sorted(path.name for path in run.folder.iterdir())
    plots = ["loss.png", "throughput.png"]  # nobody to wait for
    assert names == sorted(["checkpoints", "metrics.jsonl", "settings.json", "summary.json", *plots])
    kept = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000004", "step-00000006"]
    out, err = capfd.readouterr()
    assert out.startswith("1 rank, no MPI")
    assert f"{run.folder}: Ctrl-C, or kill -TERM " in out
    assert re.search(rf"{NUM_STEPS} steps in \d+(\.\d)? s", out)
    assert "waits" not in out
    assert f"plots, metrics and checkpoints are in {run.folder}" in out
    assert err.splitlines()[-1].startswith(f"step {NUM_STEPS}/{NUM_STEPS}, ")


def test_metrics_and_summary() -> None:
    start = time.perf_counter()
    run = train(SETTINGS)
    found = lines(run)
    assert sum(line["seconds"] for line in found) < time.perf_counter() - start
    assert [line["step"] for line in found] == list(range(NUM_STEPS))
    assert [line["learning_rate"] for line in found] == [0.1 / (1 + step) for step in range(NUM_STEPS)]
    assert all(line["seconds"] > 0 and "exposed_comm_seconds" not in line for line in found)
    assert all(line["samples_per_second"] * line["seconds"] == pytest.approx(1) for line in found)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["steps"], summary["accuracy"], summary["loss"]) == (NUM_STEPS, 0.5, found[-1]["loss"])


def test_the_summary_says_what_a_run_came_to() -> None:
    speed = "samples_per_second"
    first = {"step": 0, "seconds": 4.0, "loss": 2.0, speed: 300.0, "grad_norm": 1.0}
    figures, words = summarize([first], "samples", speed)
    assert figures == {"steps": 1, "seconds": 4.0, "loss": 2.0, speed: 300.0}
    assert words == "1 step in 4.0 s, 300 samples/s"
    second = {"step": 1, "seconds": 8.0, "loss": 1.0, speed: 150.0, "exposed_comm_seconds": 2.0, "grad_norm": None}
    figures, words = summarize([first | {"exposed_comm_seconds": 1.0}, second], "samples", speed)
    assert figures == {
        "steps": 2,
        "seconds": 12.0,
        "loss": 1.0,
        speed: 200.0,
        "exposed_comm_share": 0.25,
        "skipped_steps": 1,
    }
    assert words == (
        "2 steps in 12 s, 200 samples/s, 25% of it in waits for other ranks; "
        "1 skipped, with gradients that were not finite"
    )


def test_the_summary_counts_the_steps_before_a_resume() -> None:
    train(SETTINGS, stop_at=2)
    run = train(replace(SETTINGS, resume="auto"))
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == NUM_STEPS
    assert summary["seconds"] == pytest.approx(sum(line["seconds"] for line in lines(run)))
    assert summary["samples_per_second"] == pytest.approx(NUM_STEPS / summary["seconds"])


def test_a_folder_that_cannot_be_made_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    Path("run").write_text("a file")
    with pytest.raises(SystemExit, match=r"^2$"):
        train(SETTINGS)
    assert "--run must be a folder that can be written to, got run: File exists" in capfd.readouterr().err


def test_quiet_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    train(SETTINGS)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stop_at", range(NUM_STEPS - 1))
def test_ended_early_and_gone_on_with_equals_undisturbed(stop_at: int, capfd: pytest.CaptureFixture[str]) -> None:
    expected = lines(train(replace(SETTINGS, run="undisturbed")))
    run = train(replace(SETTINGS, quiet=False), stop_at=stop_at)
    assert run.stopped
    assert f"stopped after step {stop_at + 1} as asked" in capfd.readouterr().out
    assert not (run.folder / "summary.json").exists()
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "loss": 0.0}\n{"step": 100, "lo')  # steps after the last checkpoint, the last one torn
    train(replace(SETTINGS, resume="auto"))
    for line, right in zip(lines(run), expected, strict=True):
        assert [line[key] for key in ("step", "loss", "rows", "learning_rate")] == [
            right[key] for key in ("step", "loss", "rows", "learning_rate")
        ]


def test_a_signal_in_the_last_step_is_the_end_as_it_is() -> None:
    assert not train(SETTINGS, stop_at=NUM_STEPS - 1).stopped


def test_nothing_to_resume_starts_anew(capfd: pytest.CaptureFixture[str]) -> None:
    run = train(replace(SETTINGS, resume="auto", quiet=False))
    line = "--resume auto finds nothing to go on with in run: a new run starts there"
    assert line in capfd.readouterr().err.splitlines()
    assert len(lines(run)) == NUM_STEPS


def test_a_torn_checkpoint_is_passed_over_aloud(capfd: pytest.CaptureFixture[str]) -> None:
    run = train(SETTINGS)
    (run.folder / "checkpoints" / "step-00000006" / "manifest.json").write_text("{")
    train(replace(SETTINGS, resume="auto", quiet=False))
    out, err = capfd.readouterr()
    assert "passed over run/checkpoints/step-00000006: " in err
    assert "goes on after step 4 of run/checkpoints/step-00000004, learning rate 0.02" in out
    assert len(lines(run)) == NUM_STEPS


def test_a_run_that_is_longer_than_asked_for_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(SETTINGS)
    with pytest.raises(SystemExit, match=r"^2$"):
        train(replace(SETTINGS, resume="auto", steps=5))
    assert "--steps must be at least the 6 that are done, got 5" in capfd.readouterr().err


def test_where_no_checkpoint_is_good_it_says_why_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    run = train(SETTINGS)
    for manifest in run.folder.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    with pytest.raises(SystemExit, match=r"^2$"):
        train(replace(SETTINGS, resume="auto"))
    _, *lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"run/checkpoints/step-0000000{step}" for step in (6, 4)]


def test_a_checkpoint_s_folder_starts_a_new_run_from_there(capfd: pytest.CaptureFixture[str]) -> None:
    source = train(SETTINGS)
    before = sorted(source.folder.rglob("*"))
    capfd.readouterr()
    checkpoint = str(source.folder / "checkpoints" / "step-00000004")
    run = train(replace(SETTINGS, run=None, resume=checkpoint, steps=8, save_every=3, quiet=False))
    out = capfd.readouterr().out
    assert "goes on after step 4 of run/checkpoints/step-00000004, learning rate 0.02" in out
    assert "with --steps 6 -> 8, --save-every 2 -> 3" in out
    assert [line["step"] for line in lines(run)] == list(range(8))
    assert [line["loss"] for line in lines(run)[:6]] == [line["loss"] for line in lines(source)]
    assert sorted(source.folder.rglob("*")) == before


def test_a_checkpoint_from_before_a_flag_was_known_goes_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    to_save = run_module.to_save

    def older(settings: RunSettings) -> dict[str, Any]:
        saved = to_save(settings)
        del saved["settings"]["keep"]
        return saved

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "to_save", older)
        train(SETTINGS, stop_at=2)
    run = train(replace(SETTINGS, resume="auto", quiet=False))
    assert "with --keep None -> 2" in capfd.readouterr().out
    assert len(lines(run)) == NUM_STEPS


def test_a_new_run_with_nothing_left_to_do_and_no_metrics_ends_in_peace() -> None:
    source = train(SETTINGS)
    (source.folder / "metrics.jsonl").unlink()
    run = train(replace(SETTINGS, run=None, resume=str(source.folder / "checkpoints" / "step-00000006")))
    assert lines(run) == []


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_left_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(train(SETTINGS).folder)
    run = train(replace(SETTINGS, resume="auto", quiet=False, save_every=1, batch=2))
    assert run.stopped
    assert contents(run.folder) == before
    assert "nothing is left of 6 steps: --steps 12 would do more" in capfd.readouterr().out


def test_a_run_that_was_done_but_not_summed_up_is_summed_up() -> None:
    (train(SETTINGS).folder / "summary.json").unlink()
    run = train(replace(SETTINGS, resume="auto"))
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == NUM_STEPS


def test_a_run_that_goes_on_has_no_summary_until_it_ends() -> None:
    """By its summary a job in a queue knows that it need not be queued again."""
    train(SETTINGS)
    run = train(replace(SETTINGS, resume="auto", steps=9), stop_at=NUM_STEPS)
    assert run.stopped
    assert not (run.folder / "summary.json").exists()


def test_the_last_step_is_saved_whenever_the_others_are() -> None:
    run = train(replace(SETTINGS, steps=5))
    assert (run.folder / "checkpoints" / "latest").read_text() == "step-00000005\n"


def test_what_is_refused_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run = train(SETTINGS)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match=r"^2$"):
        train(replace(SETTINGS, resume="auto", steps=5))
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_a_resume_that_is_refused_leaves_no_folder(capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = train(SETTINGS).folder / "checkpoints" / "step-00000006"
    for folder in (None, "new"):
        with pytest.raises(SystemExit, match=r"^2$"):
            train(replace(SETTINGS, run=folder, resume=str(checkpoint), steps=5))
    assert "--steps must be at least the 6 that are done, got 5" in capfd.readouterr().err
    assert [path for path in Path().rglob("*") if path.is_dir() and not path.is_relative_to("run")] == [Path("runs")]


@pytest.mark.parametrize("way", ["to its end", "early", "done before", "refused", "to a bad loss", "without metrics"])
def test_whoever_comes_after_a_run_that_has_ended_has_its_folder(way: str) -> None:
    """However it ended, and whoever still holds the run, as an error does that is looked at."""
    settings, how = SETTINGS, {"stop_at": 2} if way == "early" else {}
    if way in ("done before", "refused", "without metrics"):
        train(SETTINGS, stop_at=2 if way == "without metrics" else -1)
        settings = replace(SETTINGS, resume="auto", steps=5 if way == "refused" else NUM_STEPS)
    if way == "without metrics":
        Path("run/metrics.jsonl").write_text("{\n")
    held: Any
    if way in ("refused", "to a bad loss", "without metrics"):
        with pytest.raises(SystemExit) as held:
            train(settings, bad_loss=way == "to a bad loss")
    else:
        held = train(settings, **how)
    RunFolder("run").close()
    del held


def test_a_run_that_never_began_leaves_no_folder() -> None:
    Run(SETTINGS, SoloCommunicator())
    assert list(Path().iterdir()) == []


def test_without_locks_it_runs_with_a_warning(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    run = train(SETTINGS)
    assert len(lines(run)) == NUM_STEPS
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: the file system of run has no locks (Function not implemented)")


def test_whoever_waited_for_a_folder_has_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last owner removes the file that is locked: who had opened it before held a lock that nobody else could see.
    first = RunFolder("run")

    def leave(_: float) -> None:
        first.close()

    monkeypatch.setattr(time, "sleep", leave)
    second = RunFolder("run", patient=True)
    with pytest.raises(ValueError, match="run is being run by process"):
        RunFolder("run")
    second.close()
    RunFolder("run").close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, 524, errno.EIO])
def test_only_a_disk_that_fails_is_more_than_one_without_locks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.EIO:
        with pytest.raises(ValueError, match="--run must be a folder that can be written to, got run: Input/output"):
            RunFolder("run")
    else:
        assert "has no locks" in str(RunFolder("run").warning)


def test_a_folder_that_was_there_before_stays() -> None:
    Path("run").mkdir()
    RunFolder("run").close()
    assert list(Path("run").iterdir()) == []


@pytest.mark.parametrize(
    ("steps_before", "last", "kept"),
    [([0, 1, 2, 3], 2, [0, 1, 2]), ([0, 1], 2, [0, 1, 2]), ([0, 1], 1, [0, 1]), ([0, 1], None, [0, 1]), ([], 2, [2])],
)
def test_the_line_of_a_step_whose_writer_died_over_it_is_added_once(
    steps_before: list[int], last: int | None, kept: list[int]
) -> None:
    folder = RunFolder("run")
    metrics = folder.path / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}}}\n' for step in steps_before))
    folder.write_summary({})
    folder.begin({}, metrics, 3, goes_on=False, last=None if last is None else {"step": last})
    assert [line["step"] for line in folder.read_metrics()] == kept
    assert folder.is_finished()
    folder.begin({}, metrics, 3, goes_on=True)
    assert not folder.is_finished()


def test_the_first_line_of_each_process_says_on_how_many_ranks() -> None:
    train(SETTINGS, stop_at=2)
    run = train(replace(SETTINGS, resume="auto"))
    assert [line.get("ranks") for line in lines(run)] == [1, None, None, 1, None, None]


def test_a_run_that_ends_early_is_drawn_and_its_job_knows_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(run_folder, "draw_plots", lambda path, **_: drawn.append(path))
    monkeypatch.setenv("MINIGRAD_JOB_FOLDER", "job")
    run = train(SETTINGS, stop_at=2)
    assert drawn == [run.folder]
    assert Path("job/run").read_text() == str(run.folder)


def test_metrics_that_were_removed_are_not_begun_again(capfd: pytest.CaptureFixture[str]) -> None:
    model = Linear(ParamGetter(), 2, 1)
    run = Run(SETTINGS, SoloCommunicator())
    steps = run.steps(model, Optimizer(model.parameters(), SGD(0.1)), Sampler(5, batch_size=1, seed=0))

    def train_on() -> None:
        for step in steps:
            if step == 3:
                (run.folder / "metrics.jsonl").unlink()
            run.log(1.0)

    with pytest.raises(SystemExit, match=r"^2$"):
        train_on()
    assert "run/metrics.jsonl: No such file or directory" in capfd.readouterr().err


def test_two_runs_of_one_second_have_folders_of_their_own() -> None:
    settings = replace(SETTINGS, run=None)
    runs = [Run(settings, SoloCommunicator()) for _ in range(3)]
    assert len({run.folder for run in runs}) == 3
    assert all(run.folder.parent == Path("runs") for run in runs)


def test_a_run_that_is_alive_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(SETTINGS, SoloCommunicator())
    with pytest.raises(SystemExit, match=r"^2$"):
        Run(SETTINGS, SoloCommunicator())
    assert f"run is being run by process {os.getpid()}: end that first" in capfd.readouterr().err
    del run
    Run(SETTINGS, SoloCommunicator())


def test_metrics_of_a_step_are_on_the_disk_before_the_next() -> None:
    model = Linear(ParamGetter(), 2, 1)
    run = Run(SETTINGS, SoloCommunicator())
    for step in run.steps(model, Optimizer(model.parameters(), SGD(0.1)), Sampler(5, batch_size=1, seed=0)):
        assert len(lines(run)) == step
        run.log(1.0)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
    value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Linear(ParamGetter(), 2, 1)
    run = Run(replace(SETTINGS, save_every=1), SoloCommunicator())
    steps = run.steps(model, Optimizer(model.parameters(), SGD(0.1)), Sampler(5, batch_size=1, seed=0))

    def diverge() -> None:
        for step in steps:
            run.log(float(value) if step == 3 else 1.0)

    with pytest.raises(SystemExit, match=r"^2$"):
        diverge()
    line = f"the loss of step 4 is {value}, and what follows would be too; "
    assert f"{line}the last checkpoint is run/checkpoints/step-00000003" in capfd.readouterr().err
    assert (run.folder / "checkpoints" / "latest").read_text() == "step-00000003\n"


def test_a_full_disk_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distributed.checkpoint.files.save_file", full)
    with pytest.raises(SystemExit, match=r"^2$"):
        train(SETTINGS)
    (line,) = capfd.readouterr().err.splitlines()
    assert "the checkpoint of step 2 could not be written: OSError: [Errno 28] No space left on device" in line


def test_a_disk_that_fills_while_a_step_is_noted_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk_at(3, monkeypatch)

    def program(comm: Communicator) -> None:
        with pytest.raises(SystemExit, match=r"^2$"):
            train(SETTINGS, comm)

    LocalWorld(2).run(program)
    what = "run/metrics.jsonl: No space left on device; the last checkpoint is run/checkpoints/step-00000002"
    assert {line.split(": ", 1)[1] for line in capfd.readouterr().err.splitlines()} == {what}


def test_a_run_whose_folder_is_removed_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    model = Linear(ParamGetter(), 2, 1)
    run = Run(SETTINGS, SoloCommunicator())
    steps = run.steps(model, Optimizer(model.parameters(), SGD(0.1)), Sampler(5, batch_size=1, seed=0))

    def train_on() -> None:
        for step in steps:
            while step == 3 and run.folder.exists():
                shutil.rmtree(run.folder, ignore_errors=True)  # a save under way may take its file away meanwhile
            run.log(1.0)

    with pytest.raises(SystemExit, match=r"^2$"):
        train_on()
    assert "run/metrics.jsonl: No such file or directory; nothing was saved" in capfd.readouterr().err
    assert not run.folder.exists()


def test_a_picture_that_fails_is_one_line_and_costs_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_plots(*_: object, **__: object) -> None:
        raise IndexError("list index\nout of range")

    monkeypatch.setattr(run_folder, "draw_plots", draw_plots)
    run = train(SETTINGS)
    assert json.loads((run.folder / "summary.json").read_text())["accuracy"] == 0.5
    assert capfd.readouterr().err == "no plots: IndexError: list index out of range\n"


def test_a_number_that_is_not_finite_is_null_and_its_step_was_skipped() -> None:
    model = Linear(ParamGetter(), 2, 1)
    run = Run(SETTINGS, SoloCommunicator())
    norms = [1.0, float("inf"), 2.0, float("nan"), float("nan"), 3.0]
    for step in run.steps(model, Optimizer(model.parameters(), SGD(0.1)), Sampler(5, batch_size=1, seed=0)):
        run.log(1.0, grad_norm=norms[step])
    run.end(worst=float("inf"))

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    text = (run.folder / "metrics.jsonl").read_text()
    found = [json.loads(line, parse_constant=refuse)["grad_norm"] for line in text.splitlines()]
    assert found == [1.0, None, 2.0, None, None, 3.0]
    summary = json.loads((run.folder / "summary.json").read_text(), parse_constant=refuse)
    assert (summary["skipped_steps"], summary["worst"]) == (3, None)


def test_metrics_that_cannot_be_read_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    run = train(SETTINGS)
    (run.folder / "metrics.jsonl").write_text("no metrics\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        train(replace(SETTINGS, resume="auto", steps=9))
    assert "line 1 of run/metrics.jsonl cannot be read: Expecting value" in capfd.readouterr().err
    assert (run.folder / "metrics.jsonl").read_text() == "no metrics\n"


def test_waiting_is_the_mean_over_ranks_and_speed_counts_what_samples_hold() -> None:
    def program(comm: Communicator) -> tuple[Path, float]:
        model = Linear(ParamGetter(), 2, 1)
        run = Run(replace(SETTINGS, steps=1, batch=4), comm, samples="tokens", size=10)
        for _ in run.steps(model, Optimizer(model.parameters(), SGD(0.1)), Sampler(5, batch_size=4, seed=0)):
            before = comm.waited_seconds
            comm.barrier()
            if comm.rank == 0:
                time.sleep(0.02)
            comm.barrier()  # where rank 1 waits
            waited = comm.waited_seconds - before
            run.log(1.0)
        return run.folder, waited

    (folder, waited), (_, waited_by_other) = LocalWorld(2).run(program)
    line = json.loads((folder / "metrics.jsonl").read_text())
    assert waited != waited_by_other
    assert line["exposed_comm_seconds"] == pytest.approx((waited + waited_by_other) / 2)
    assert line["tokens_per_second"] * line["seconds"] == pytest.approx(40)


def test_a_step_that_logs_nothing_is_an_error() -> None:
    model = Linear(ParamGetter(), 2, 1)
    run = Run(SETTINGS, SoloCommunicator())
    steps = run.steps(model, Optimizer(model.parameters(), SGD(0.1)), Sampler(5, batch_size=1, seed=0))
    next(steps)
    with pytest.raises(RuntimeError, match="every step logs its loss"):
        next(steps)


def test_ranks_share_a_folder_and_stop_together() -> None:
    def program(comm: Communicator) -> tuple[Path, bool]:
        run = train(replace(SETTINGS, run=None), comm, stop_at=3)
        return run.folder, run.stopped

    (folder, stopped), *others = LocalWorld(2).run(program)
    assert stopped
    assert others == [(folder, True)]
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000004\n"

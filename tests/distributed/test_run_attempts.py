"""A run whose ranks die, on threads: its metrics, checkpoints and words are those of a run that nobody died in.

Processes and real kills are in `tests/examples/test_train_gpt_heal.py`.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill_disk_at
from toy_recovery import builder, kill

from distributed import Communicator, LocalWorld, SoloCommunicator
from distributed.comm.failure import Heal
from distributed.run import RunSettings
from distributed.run import folder as run_folder
from distributed.run.folder import RunFolder
from distributed.run.run import Run
from distributed.stop import StopRequest
from minigrad import rng

NUM_STEPS = 5
SETTINGS = RunSettings(steps=NUM_STEPS, batch=12, run="run", save_every=2, keep=2, quiet=True)
Moment = tuple[int, int, str]  # a rank, a step, and where in it that rank dies


class Unasked(StopRequest):
    """Whom no signal asks: these come to the main thread."""

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None: ...


def asked_after(num_steps: int) -> type[StopRequest]:
    """Return a request that the second rank alone gets."""

    class Asked(Unasked):
        num_asked = 0

        def agreed(self) -> bool:
            self.num_asked += 1
            if self.num_asked == num_steps and self._comm.rank == 1:
                self.request()
            return super().agreed()

    return Asked


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("kept")
    monkeypatch.setattr(run_folder, "draw_plots", lambda *_, **__: [])
    monkeypatch.setattr("distributed.run.run.StopRequest", Unasked)


def die() -> None:
    """Die as a process does, with all its threads: one that saves would go on here, and remove what others save."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    kill()


def train(
    settings: RunSettings,
    *deaths: Moment,
    heal: Heal = Heal.REPLACE,
    size: int = 3,
    pp: int = 1,
    num_spares: int = 0,
    bad_loss: int = -1,
) -> list[dict[str, Any]]:
    """Train on threads, some of which die; return the run's metrics."""

    def program(comm: Communicator) -> None:
        moments = set() if comm.is_newcomer else {moment[1:] for moment in deaths if moment[0] == comm.rank}
        run = Run(settings, comm)
        run.keep("words.txt")
        for attempt in run.attempts(builder(pp), heal=heal, num_spares=num_spares):
            with attempt as toy:
                x, y = toy.data.next()
                toy.optimizer.zero_grad()
                hooks = toy.ddp.hooks(num_samples=len(x))
                with rng.scope(seed=3, step=attempt.step, first_sample=toy.ddp.first_sample):
                    loss = toy.pipe.step(x, y, hooks=hooks)
                toy.ddp.wait()
                loss = toy.ddp.mean(loss)
                if (attempt.step, "reduced") in moments:
                    die()
                loss = float("nan") if attempt.step == bad_loss else loss
                attempt.commit(loss, once=attempt.step, take=attempt.step != 1)
                if (attempt.step, "committed") in moments:
                    die()
        if not run.stopped:
            assert run.training.optimizer.num_steps == NUM_STEPS - 1
        run.end(accuracy=0.5)

    LocalWorld(size, survive=True, timeout_seconds=20).run(program)
    return [json.loads(line) for line in Path(settings.run or "", "metrics.jsonl").read_text().splitlines()]


def of_steps(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(line["step"], line["once"], line["learning_rate"], pytest.approx(line["loss"])) for line in lines]


@pytest.mark.parametrize("heal", [Heal.REPLACE, Heal.SHRINK])
@pytest.mark.parametrize("moment", ["reduced", "committed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_step_has_one_line_whoever_dies(
    rank: int, moment: str, heal: Heal, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = train(replace(SETTINGS, run="undisturbed"))
    assert capfd.readouterr().err == ""
    assert all(0 < line["exposed_comm_seconds"] < line["seconds"] for line in expected)
    found = train(SETTINGS, (rank, 2, moment), heal=heal)
    assert of_steps(found) == of_steps(expected)
    redone = 2 if moment == "reduced" else 3
    assert [line["step"] for line in found if "recovery_seconds" in line] == [redone]
    assert found[redone]["redone_steps"] == 0
    ranks = 3 if heal is Heal.REPLACE else 2
    assert [line.get("ranks") for line in found if "ranks" in line] == [3, ranks]
    told, healed = capfd.readouterr().err.splitlines()
    assert told.startswith(f"rank {rank} died")
    assert f"rank {rank} died, healed in " in healed
    assert f"{ranks} ranks go on after step {redone}, from a living rank" in healed
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == [
        "latest",
        "step-00000004",
        "step-00000005",
    ]
    assert json.loads(Path("run/summary.json").read_text())["accuracy"] == 0.5
    assert Path("run/words.txt").read_text() == "kept"


@pytest.mark.parametrize(("step", "source"), [(1, "the beginning"), (3, "the last checkpoint")])
def test_what_nobody_has_any_more_comes_from_the_last_checkpoint(
    step: int, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = train(replace(SETTINGS, run="undisturbed"), size=2, pp=2)
    found = train(SETTINGS, (1, step, "reduced"), size=2, pp=2)
    assert of_steps(found) == of_steps(expected)
    first = step - step % 2 if step > 1 else 0
    assert found[first]["redone_steps"] == step - first
    said = capfd.readouterr().err
    assert f"2 ranks go on after step {first}, from {source}, 1 step is done again" in said
    assert "finds nothing to go on with" not in said, "nobody has asked for it"


@pytest.mark.parametrize(("save_every", "first"), [(9, 1), (2, 2)])
def test_a_run_that_began_at_a_checkpoint_goes_back_there_until_it_has_one_of_its_own(
    save_every: int, first: int, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = train(replace(SETTINGS, run="before", save_every=1, keep=NUM_STEPS), size=2, pp=2)
    settings = replace(SETTINGS, resume="before/checkpoints/step-00000001", save_every=save_every)
    found = train(settings, (1, 3, "reduced"), size=2, pp=2)
    assert of_steps(found) == of_steps(expected)
    assert f"2 ranks go on after step {first}, from the last checkpoint" in capfd.readouterr().err


def test_who_goes_on_says_once_how_to_end_it(capfd: pytest.CaptureFixture[str]) -> None:
    train(replace(SETTINGS, quiet=False), (1, 2, "reduced"))
    assert capfd.readouterr().out.count("saves and ends this run") == 1


def test_a_run_that_was_done_but_not_summed_up_is_summed_up() -> None:
    train(SETTINGS)
    Path("run/summary.json").unlink()
    train(replace(SETTINGS, resume="auto"))
    assert json.loads(Path("run/summary.json").read_text())["accuracy"] == 0.5


def test_a_run_that_is_done_lets_others_into_its_folder() -> None:
    train(SETTINGS)
    runs = []

    def program(comm: Communicator) -> None:
        runs.append(Run(replace(SETTINGS, resume="auto"), comm))
        assert list(runs[-1].attempts(builder(1))) == []

    LocalWorld(1, survive=True).run(program)
    RunFolder("run").close()


def test_a_run_goes_on_with_what_is_in_its_folder_only_where_it_is_asked_to() -> None:
    train(SETTINGS)
    with pytest.raises(RuntimeError, match="run/checkpoints holds step-00000005 already"):
        train(SETTINGS)


def test_a_run_that_cannot_be_built_ends_in_one_line_and_leaves_no_folder(capfd: pytest.CaptureFixture[str]) -> None:
    def build(comm: Communicator) -> Any:
        raise ValueError("a model that cannot be")

    run = Run(SETTINGS, SoloCommunicator())
    with pytest.raises(SystemExit, match=r"^2$"):
        next(run.attempts(build, heal=None))
    assert capfd.readouterr().err.endswith(": a model that cannot be\n")
    assert not Path("run").exists()


def test_a_bar_ends_its_line_before_an_error_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with pytest.raises(SystemExit, match=r"^2\b"):
        train(replace(SETTINGS, quiet=False, progress="bar"), bad_loss=3, size=1)
    told = capfd.readouterr().err
    assert "\n" in told[: told.index("the loss of step 4 is nan")]


@pytest.mark.parametrize("num_spares", [0, 1])
def test_a_run_that_is_asked_to_ends_early_and_goes_on(
    num_spares: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    heal = Heal.SPARES if num_spares else Heal.REPLACE
    with monkeypatch.context() as patch:
        patch.setattr("distributed.run.run.StopRequest", asked_after(3))
        lines = train(replace(SETTINGS, quiet=False, progress="lines"), heal=heal, num_spares=num_spares)
        assert [line["step"] for line in lines] == [0, 1, 2]
    assert "stopped after step 3 as asked; to go on: --resume auto --run run" in capfd.readouterr().out
    assert not Path("run/summary.json").exists()
    found = train(replace(SETTINGS, resume="auto"))
    assert [line["step"] for line in found] == list(range(NUM_STEPS))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    train(replace(SETTINGS, resume="auto"))  # of which all is done
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_run_that_is_asked_to_in_its_last_step_ends_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.run.run.StopRequest", asked_after(NUM_STEPS))
    assert len(train(SETTINGS)) == NUM_STEPS
    assert Path("run/summary.json").exists()


def test_a_loss_that_is_not_finite_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2\b"):
        train(SETTINGS, bad_loss=3)
    assert "the loss of step 4 is nan, and what follows would be too; the last checkpoint is" in capfd.readouterr().err


def test_a_disk_that_fills_while_a_step_is_noted_ends_the_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk_at(3, monkeypatch)
    with pytest.raises(SystemExit, match=r"^2\b"):
        train(SETTINGS)
    what = "run/metrics.jsonl: No space left on device; the last checkpoint is run/checkpoints/step-00000002"
    assert what in capfd.readouterr().err

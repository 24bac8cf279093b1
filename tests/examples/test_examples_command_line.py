"""The command line of the example scripts: what is read, from where, and who says what is wrong."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.text import load_tokens
from common.train_gpt_settings import TrainSettings
from distributed.checkpoint.files import Manifest, commit
from distributed.comm.outcome import read_end
from distributed.run import ReplicaSettings, RunSettings, command_line, read_flags
from distributed.run.command_line import find_run, read_saved, read_settings, to_save
from distributed.run.flags import flag_of


def run_as_rank(rank: int, size: int, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Read settings and a text as a script does that Open MPI has started, but in this process."""
    said, complained, code = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complained),
    ):
        patch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        patch.setenv("OMPI_COMM_WORLD_SIZE", str(size))
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(command_line, "GRACE_SECONDS", 0.0)
        patch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            settings = read_settings(TrainSettings, "Teaches.")
            command_line.run_script(lambda: load_tokens(settings.text))
            said.write("ready\n")
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--dp 3", "dp * pp must equal the number of ranks, got dp=3, pp=1 and 2 ranks"),
        ("--dp 2 --steps many", "--steps must be an integer, got 'many'"),
        ("--dp 2 --step 3", "unrecognized arguments: --step 3; is it --steps?"),
        ("--dp 2 steps 3", "unrecognized arguments: steps 3; is it --steps?"),
        ("--dp 2 --half-blocks yes", "unrecognized arguments: yes"),  # "is it --layers?"
        ("--dp 2 --generate 3", "unrecognized arguments: --generate 3"),  # "is it --no-exact?", for their dashes
    ],
)
def test_wrong_command_line_is_one_line_from_one_rank(arguments: str, line: str) -> None:
    for rank, expected in ((0, f"train.py: {line}\n"), (1, "")):
        result = run_as_rank(rank, 2, *arguments.split())
        assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


@pytest.mark.parametrize("flag", ["--run", "--resume", "--text", "--init-from", "--wandb", "--compress", "--lr-scale"])
def test_a_flag_without_its_value_is_no_folder(flag: str) -> None:
    """`--run "$RUN"` without a RUN left its files where one was, and `--text ""` read all that was there."""
    result = run_as_rank(0, 1, f"{flag}=")
    assert (result.returncode, result.stderr) == (2, f"train.py: {flag} must not be empty\n")


def test_a_flag_that_a_resumed_run_keeps_can_be_taken_back_and_one_for_once_cannot() -> None:
    def given(argument: str) -> dict[str, object]:
        return vars(command_line.parser(TrainSettings, "").parse_args([argument]))

    assert [given("--exact"), given("--no-exact"), given("--quiet")] == [
        {"exact": True},
        {"exact": False},
        {"quiet": True},
    ]
    result = run_as_rank(0, 2, "--no-quiet")
    assert (result.returncode, result.stderr) == (2, "train.py: unrecognized arguments: --no-quiet; is it --quiet?\n")


def test_unreadable_text_is_one_line_and_a_lone_rank_says_so_too() -> None:
    line = (
        "train.py: --text: tokens must be a file or directory that can be read, got gone: No such file or directory\n"
    )
    for rank, expected in ((0, line), (1, f"[rank 1] {line}")):
        result = run_as_rank(rank, 2, "--dp", "2", "--text", "gone")
        assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_help_teaches_every_flag_once() -> None:
    result = run_as_rank(0, 2, "--help")
    assert result.returncode == 0
    assert "Teaches." in result.stdout
    for f in fields(TrainSettings):
        assert len(re.findall(rf"\n  {flag_of(f.name)}[ ,]", result.stdout)) == 1
    titles = [line for line in result.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles[:2] == ["options:", "Every run:"]
    assert "  --lr RATE " in result.stdout
    assert "  --progress {auto,bar,lines}\n" in result.stdout
    assert "default: None" not in result.stdout
    assert len(titles) == len(set(titles)) == 14  # "options", and what each of thirteen classes adds
    result = run_as_rank(1, 2, "--help")
    assert (result.returncode, result.stdout) == (0, "")


def test_right_command_line_goes_on() -> None:
    result = run_as_rank(1, 4, "--dp", "2", "--pp", "2")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ready\n", "")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs in runs/: an older and a newer one of `train`, and a newest one that never saved its settings.

    The checkpoint of the older one is of when its learning rate was still 0.125.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["examples/train.py"])
    Path("runs/worker-9").mkdir(parents=True)
    Path("runs/worker-9/settings.json").write_text(json.dumps(to_save(TrainSettings()) | {"script": "worker"}))
    for name, layers in (("train-1", 5), ("train-2", 6)):
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        settings = TrainSettings(layers=layers, lr=0.25, run=str(folder), quiet=True, text="here")
        (folder / "settings.json").write_text(json.dumps(to_save(settings)))
    Path("runs/train-3").mkdir()
    state = to_save(TrainSettings(layers=5, lr=0.125))
    unfinished = Path("runs/train-1/checkpoints/saving-7")
    unfinished.mkdir(parents=True)
    commit(unfinished, Manifest(7, 7, "save", {}, state), keep_last=1)
    return Path("runs")


CHECKPOINT = "runs/train-1/checkpoints/step-00000007"


def test_settings_are_saved_and_read_back_but_for_those_of_one_start(runs: Path) -> None:
    saved = read_saved(runs / "train-1" / "settings.json", TrainSettings)
    assert TrainSettings(**saved) == TrainSettings(layers=5, lr=0.25, text="here")
    assert "layers" not in read_saved(runs / "train-1" / "settings.json", RunSettings)
    of_before = to_save(TrainSettings(layers=5))
    del of_before["settings"]["layers"]  # it goes on with the default, and with any other too
    (runs / "train-1" / "settings.json").write_text(json.dumps(of_before))
    assert "layers" not in read_saved(runs / "train-1" / "settings.json", TrainSettings)


@pytest.mark.parametrize(
    ("run", "resume", "settings", "folder"),
    [
        (None, None, None, None),
        ("runs/other", None, None, "runs/other"),
        ("runs/train-3", None, None, "runs/train-3"),
        (None, "auto", "runs/train-2/settings.json", "runs/train-2"),
        ("runs/train-1", "auto", "runs/train-1/settings.json", "runs/train-1"),
        ("runs/train-3", "auto", None, "runs/train-3"),
        ("runs/other", "auto", None, "runs/other"),
        (None, CHECKPOINT, f"{CHECKPOINT}/manifest.json", None),
        ("runs/other", CHECKPOINT, f"{CHECKPOINT}/manifest.json", "runs/other"),
    ],
)
def test_what_goes_on(
    runs: Path, run: str | None, resume: str | None, settings: str | None, folder: str | None
) -> None:
    assert find_run(run, resume) == (settings and Path(settings), folder)


@pytest.mark.parametrize(
    ("arguments", "run", "layers", "lr", "quiet"),
    [
        ("--resume auto", "runs/train-2", 6, 0.25, False),
        ("--resume auto --lr 0.5 --layers 6 --quiet", "runs/train-2", 6, 0.5, True),
        ("--resume auto --run runs/train-1", "runs/train-1", 5, 0.25, False),
        ("--resume auto --run runs/other", "runs/other", 4, 3e-3, False),
        (f"--resume {CHECKPOINT}", None, 5, 0.125, False),
        (f"--resume {CHECKPOINT} --run runs/other --lr 1", "runs/other", 5, 1.0, False),
    ],
)
def test_what_is_resumed_has_its_old_settings(
    runs: Path, arguments: str, run: str | None, layers: int, lr: float, quiet: bool
) -> None:
    settings = read_settings(TrainSettings, "", arguments.split())
    assert (settings.run, settings.layers, settings.lr, settings.quiet) == (run, layers, lr, quiet)


@dataclass(frozen=True)
class HeirSettings(TrainSettings):
    """Settings that take something over from elsewhere."""

    @classmethod
    def inherited(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return super().inherited(given) | {"keep": 7, "warmup": len(given)}


@pytest.mark.parametrize(
    ("arguments", "keep", "warmup"),
    [("", 7, 0), ("--lr 1", 7, 1), ("--keep 2", 2, 1), ("--resume auto", 3, -1), (f"--resume {CHECKPOINT}", 3, -1)],
)
def test_a_new_run_takes_over_what_its_settings_inherit(runs: Path, arguments: str, keep: int, warmup: int) -> None:
    settings = read_settings(HeirSettings, "", arguments.split())
    assert (settings.keep, settings.warmup) == (keep, warmup)


WHERE = " (flags that are not given are as in runs/train-2/settings.json)"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "--run runs/train-1",
            "--run runs/train-1 holds a run: go on with it by --resume auto, or name another folder",
        ),
        (
            "--resume auto --layers 9",
            f"--layers cannot change when a run is resumed: it was 6, got 9{WHERE}",
        ),
        (
            "--resume auto --dp 2",
            "dp * pp must equal the number of ranks, got dp=2, pp=1 and 1 rank; "
            f"mpirun -n 2 python -m mpi4py SCRIPT starts so many{WHERE}",
        ),
        (
            "--resume runs/train-1",
            "--resume runs/train-1 is a run and no checkpoint: --run runs/train-1 --resume auto goes on with it",
        ),
        ("--resume runs/train-3", "--resume must be auto or the folder of a checkpoint, got runs/train-3"),
        (
            f"--resume {CHECKPOINT} --run runs/train-2",
            "--run runs/train-2 holds a run: go on with it by --resume auto, or name another folder",
        ),
    ],
)
def test_what_cannot_be_resumed_is_one_line(
    runs: Path, arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        read_settings(TrainSettings, "", arguments.split())
    assert capsys.readouterr().err == f"train.py: {line}\n"


def test_a_run_is_known_by_any_of_its_files(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where its settings were lost, a run is not begun again on top of what is left of it."""
    (runs / "train-1" / "settings.json").unlink()
    (runs / "train-3" / "metrics.jsonl").touch()
    for name in ("train-1", "train-3"):
        with pytest.raises(ValueError, match=f"^--run runs/{name} holds a run: go on with it by --resume auto"):
            find_run(f"runs/{name}", None)
    assert find_run("runs/train-1", "auto") == (Path(CHECKPOINT) / "manifest.json", "runs/train-1")
    settings = read_settings(TrainSettings, "", ["--run", "runs/train-1", "--resume", "auto"])
    assert (settings.run, settings.layers, settings.lr) == ("runs/train-1", 5, 0.125)


@pytest.mark.parametrize("flag", ["--run", "--resume", "--text"])
def test_a_name_that_is_none_of_a_file_is_one_line(flag: str) -> None:
    result = run_as_rank(0, 1, flag, "x" * 300)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("train.py: ")
    assert "File name too long" in line


HUGE = "1" + "0" * 30


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--vocab 1e11", "--vocab must be an integer, got '1e11'"),
        (f"--dp 2 --vocab {HUGE}", f"--vocab must be at most 2147483647, got {HUGE}"),
        (f"--dp 2 --steps {HUGE}", f"--steps must be at most 2147483647, got {HUGE}"),
        ("--pp 2 --microbatches 2000000000 --batch 2000000000", "--microbatches must be at most 16384, got 2000000000"),
        ("--dp 2 --width 1000000", "--layers, --width, --vocab and --context make 48,000,320,000,000 weights, "),
        ("--dp 2 --layers 2000000000", "--layers, --width, --vocab and --context make 393,216,000,040,960 weights, "),
        ("--dp 2 --bucket-mb -1", "--bucket-mb must be at least 0, got -1.0"),
        ("--dp 2 --bucket-mb often", "--bucket-mb must be a number or auto, got 'often'"),
        ("--dp 2 --bucket-mb 1e308", "--bucket-mb must be at most 2147483647, got 1e+308"),
    ],
)
def test_a_number_that_no_machine_can_hold_is_one_line(arguments: str, line: str) -> None:
    result = run_as_rank(0, 2, *arguments.split())
    assert result.returncode == 2
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"train.py: {line}")


@pytest.mark.parametrize(
    ("words", "line"),
    [("Unable to allocate\n12.0 TiB", "Unable to allocate 12.0 TiB"), ("", "there is not enough memory")],
)
def test_what_cannot_be_had_is_one_line_from_one_rank(
    words: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        raise MemoryError(words)

    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match=r"^2$"):
        command_line.run_script(main)
    assert capsys.readouterr().err == f"train.py: {line}\n"
    monkeypatch.setattr(command_line, "sys", SimpleNamespace(flags=SimpleNamespace(dev_mode=True)))
    with pytest.raises(MemoryError):
        command_line.run_script(main)


def test_a_job_that_is_started_again_goes_on_with_its_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIGRAD_RUN", "runs/train-1")
    settings = read_settings(TrainSettings, "", [])
    assert (settings.run, settings.layers) == (None, 4)  # no launcher has started this
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    settings = read_settings(TrainSettings, "", ["--run", "runs/new", "--lr", "0.5"])
    assert (settings.run, settings.resume, settings.layers, settings.lr) == ("runs/train-1", "auto", 5, 0.5)


def test_a_newcomer_has_the_settings_of_those_that_it_joins(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own launcher counts one rank, and what they were checked for it is not checked for again."""
    path = runs / "train-1" / "settings.json"
    path.write_text(json.dumps(to_save(TrainSettings(layers=5, dp=2, pp=2, run="runs/train-1"))))
    (runs.parent / "job").mkdir()
    (runs.parent / "job" / "run").write_text("runs/train-1")
    monkeypatch.setenv("MINIGRAD_JOB_FOLDER", "job")
    monkeypatch.setenv("MINIGRAD_NEWCOMER", "1")
    settings = read_settings(TrainSettings, "", [])
    assert (settings.run, settings.resume, settings.layers, settings.dp) == ("runs/train-1", None, 5, 2)
    assert read_flags(ReplicaSettings, "", ["--batch", "0"]).batch == 0


def test_how_many_ranks_there_are_says_the_launcher_or_else_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "launcher_size", lambda: None)
    monkeypatch.setattr(command_line, "world", lambda: SimpleNamespace(size=2))
    assert read_settings(TrainSettings, "", ["--dp", "2"]).dp == 2
    with pytest.raises(SystemExit, match=r"^2$"):
        read_flags(ReplicaSettings, "", ["--batch", "1"])


def test_a_wrong_flag_is_the_end_of_a_job_that_would_be_started_again(tmp_path: Path) -> None:
    """All ranks have it; what one rank alone cannot have is none."""
    job = str(tmp_path / "job")
    assert run_as_rank(1, 2, "--dp", "2", "--text", "gone", MINIGRAD_JOB_FOLDER=job).returncode == 2
    assert read_end(Path(job)) is None
    assert run_as_rank(1, 2, "--dp", "3", MINIGRAD_JOB_FOLDER=job).returncode == 2
    assert read_end(Path(job)) == 2


def test_ranks_that_say_nothing_wait_for_the_one_that_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(command_line, "time", SimpleNamespace(sleep=waited.append))
    for rank in (0, 1):
        run_as_rank(rank, 2, "--dp", "3")
    assert waited == [0.0]  # GRACE_SECONDS, here


def test_a_word_stands_for_a_number() -> None:
    assert run_as_rank(0, 2, "--dp", "2", "--bucket-mb", "auto").stdout == "ready\n"


def test_what_is_nobody_s_mistake_but_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise IndexError("list index out of range")

    with pytest.raises(IndexError):
        command_line.run_script(main)


def test_what_a_checkpoint_fits_cannot_change() -> None:
    fixed = {f.name for f in fields(TrainSettings) if f.metadata["fixed"]}
    assert fixed == {"seed", "layers", "heads", "width", "context", "vocab", "dtype"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cannot be read from runs/train-1/settings.json"),
        ("[]", "cannot be read from runs/train-1/settings.json"),
        ('{"script": "train"}', "cannot be read from runs/train-1/settings.json"),
        ('{"script": "other", "settings": {}}', "runs/train-1/settings.json is of a run of other, not of train"),
        (
            '{"script": "train", "settings": {"steps": "7"}}',
            r"settings.json: Expected `int`, got `str` - at `\$.steps`",
        ),
        ('{"script": "train", "settings": {"lr": null}}', r"settings.json: Expected `float`, got `null` - at `\$.lr`"),
    ],
)
def test_settings_that_are_torn_or_foreign_are_refused(runs: Path, content: str, reason: str) -> None:
    path = runs / "train-1" / "settings.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=reason):
        read_saved(path, TrainSettings)


def test_a_checkpoint_that_is_torn_is_refused(runs: Path) -> None:
    path = Path(CHECKPOINT) / "manifest.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=f"cannot be read from {path}: manifest.json cannot be read"):
        read_saved(path, TrainSettings)

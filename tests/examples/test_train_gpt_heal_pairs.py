"""Every value of --heal with every value of the flags that it goes with: train_gpt.py on threads, one of which dies.

Each run has some values, so that each value meets each kind of healing. The script's own code runs, up to its last
line; processes and real kills are in `test_train_gpt_heal.py`.
"""

from contextvars import ContextVar
from itertools import combinations
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
from jobs import metrics_of, write_text

import train_gpt
from common.train_gpt_settings import TrainSettings
from distributed import Communicator, DistributedDataParallel, LocalWorld
from distributed.comm.local import Killed
from distributed.recovery.attempts import UNHEALED
from distributed.run.command_line import parser
from distributed.run.run import Run
from distributed.stop import StopRequest

NUM_STEPS, KILLED_AT = 5, 3
SIZES = f"--steps {NUM_STEPS} --layers 2 --heads 2 --width 8 --context 8 --batch 12 --quiet --progress none"
HEALS = {"replace": 0, "shrink": 0, "spares": 1}  # and how many ranks wait
SHARED = [  # what ranks share out, or keep each for itself
    "",
    "--zero 1",
    "--zero 2",
    "--exact --microbatches 2",
    "--exact --microbatches 2 --zero 2",
    "--compress int8",
    "--compress int4",
    "--compress float8_e4m3fn",
    "--compress float16",
    "--compress bfloat16",
    "--compress powersgd",
    "--compress topk",
]
OTHERS = [  # in turn
    ["--dp 2", "--dp 2 --pp 2", "--dp 3"],
    ["--buddy-every 1", "--save-every 1", "", "--buddy-every 2 --save-every 2"],
    ["--optimizer adamw", "--optimizer muon"],
    ["", "--precision bfloat16", "--precision float16", "--dtype float64"],
    ["", "--recompute", "--dropout 0.2", "--eval-every 2", "--check-every 2"],
    ["", "--clip 0", "--clip 0.01", "--bucket-mb 0.001", "--lr-scale embed=0.1", "--schedule gpipe"],
]


COMM: ContextVar[Communicator] = ContextVar("COMM")


def runs() -> list[Any]:
    """Return for each kind of healing a command line for each way of sharing, the other values in turn."""
    found = []
    for i, heal in enumerate(HEALS):
        for j, shared in enumerate(SHARED):
            others = [values[(j + k * i) % len(values)] for k, values in enumerate(OTHERS)]
            flags = allowed([shared, *others], [f"--heal {heal}", f"--spares {HEALS[heal]}"])
            found.append(pytest.param(heal, flags, id=flags))
    return found


def allowed(flags: list[str], always: list[str]) -> str:
    """Return as many of these flags as go with each other."""
    for num_left in reversed(range(len(flags) + 1)):
        for left in combinations(flags, num_left):
            line = " ".join(filter(None, [*left, *always]))
            if flags[1] in left and all(holds for holds, _ in settings_of(line).rules(num_ranks(line))):
                return line
    raise AssertionError


def settings_of(line: str) -> TrainSettings:
    return TrainSettings(**vars(parser(TrainSettings, None).parse_args(f"{SIZES} {line}".split())))


def num_ranks(line: str) -> int:
    settings = settings_of(line)
    return settings.dp * settings.pp + settings.spares


class Mortal(DistributedDataParallel):
    """Gradients of ranks of which one dies where they are averaged, after some steps."""

    num_to_live = 0

    def wait(self) -> None:
        if current_thread().name == "rank 1":
            Mortal.num_to_live -= 1
            if Mortal.num_to_live == 0:
                raise Killed
        super().wait()


class Unasked(StopRequest):
    """Whom no signal asks: these come to the main thread."""

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None: ...


def train(line: str, run: str, folder: Path, *, dies: bool, survive: bool = True) -> list[dict[str, Any]]:
    """Run the script; return its metrics."""
    settings = settings_of(f"{line} --run {folder / run} --text {write_text(folder)}")
    Mortal.num_to_live = KILLED_AT if dies else -1

    def program(comm: Communicator) -> None:
        COMM.set(comm)
        train_gpt.main()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "read_settings", lambda *_: settings)
        patch.setattr(train_gpt, "world", lambda **_: COMM.get())
        patch.setattr(train_gpt, "DistributedDataParallel", Mortal)
        patch.setattr("distributed.run.run.StopRequest", Unasked)
        patch.setattr(Run, "_draw", lambda _: None)
        patch.setattr(train_gpt, "SAMPLE_TOKENS", 2)
        LocalWorld(num_ranks(line), survive=survive).run(program)
    assert (folder / run / "summary.json").exists()
    return metrics_of(folder / run)


@pytest.mark.long
@pytest.mark.parametrize(("heal", "line"), runs())
def test_a_run_heals_and_comes_to_its_end(heal: str, line: str, tmp_path: Path) -> None:
    metrics = train(line, "healed", tmp_path, dies=True)
    assert [each["step"] for each in metrics] == list(range(NUM_STEPS))
    assert len([each for each in metrics if "redone_steps" in each]) == 1
    same_bits = heal == "replace" or "--exact" in line
    if heal == "spares" or ("--compress" in line and not same_bits):  # as replace; in another layout it begins anew
        return
    expected = [each["loss"] for each in train(line, "undisturbed", tmp_path, dies=False)]
    rounding = 0 if same_bits else 5e-3 if "--precision" in line else 1e-4
    assert [each["loss"] for each in metrics] == pytest.approx(expected, rel=rounding, abs=0)


def test_a_run_says_where_its_flag_heals_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # It trained unprotected without its launcher, and nobody was told.
    for heal, said in {"none": "", "replace": f"{UNHEALED}\n", "shrink": f"{UNHEALED}\n"}.items():
        train(f"--heal {heal} --layers 1", heal, tmp_path, dies=False, survive=False)
        assert capfd.readouterr().err == said, heal


def test_each_value_is_in_some_run_of_each_kind() -> None:
    lines = [line.values for line in runs()]
    values = [value for values in [SHARED, *OTHERS] for value in values if value]
    lack = [(heal, value) for heal in HEALS for value in values if not any(value in b for a, b in lines if a == heal)]
    assert lack == []

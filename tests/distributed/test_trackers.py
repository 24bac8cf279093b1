"""TensorBoard and Weights & Biases: they get each line, and what goes wrong with them is one line."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from distributed import SoloCommunicator
from distributed.run import Run, RunSettings, check
from distributed.run.trackers import Trackers
from minigrad import nn, optim

SETTINGS = RunSettings(steps=3, quiet=True)


class Batches:
    def state_dict(self):
        return {}


def train(folder, **flags):
    """A run of three steps, whose loss is its step."""
    run = Run(replace(SETTINGS, run=str(folder), **flags), SoloCommunicator())
    model = nn.Linear(nn.ParamGetter(), 2, 1)
    for step in run.steps(model, optim.Optimizer(model.parameters(), optim.SGD(lr=0.5)), Batches()):
        run.log(step)
    run.end(validation_loss=0.25)


def test_tensorboard_has_every_number_by_step(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    train(tmp_path / "run", tensorboard=True)
    (file,) = (tmp_path / "run" / "tensorboard").glob("events.*")
    data, seen = file.read_bytes(), []
    while data:  # a record: its length in 8 bytes, a sum of 4, the event, a sum of 4
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        seen += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    assert [(step, value) for step, tag, value in seen if tag == "loss"] == [(0, 0), (1, 1), (2, 2)]
    assert (2, "learning_rate", 0.5) in seen
    assert (2, "validation_loss", 0.25) in seen


class Wandb(SimpleNamespace):
    """As much of the package as is asked for."""

    def __init__(self, fails_at=None):
        super().__init__(lines=[], finished=0, fails_at=fails_at)

    def init(self, **options):
        self.options = options
        if self.fails_at == "init":
            raise RuntimeError("no account:\n log in first")
        return self

    def log(self, line, step):
        if self.fails_at == step:
            raise OSError("gone")
        self.lines.append((step, line))

    def finish(self):
        self.finished += 1


def test_wandb_has_every_line_under_the_run_s_name(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(tmp_path / "my-run", wandb="gpts")
    assert wandb.options["project"] == "gpts"
    assert wandb.options["name"] == wandb.options["id"] == "my-run"
    assert wandb.options["config"]["settings"]["steps"] == 3
    assert [(step, line.get("loss")) for step, line in wandb.lines] == [(0, 0), (1, 1), (2, 2), (2, None)]
    assert wandb.lines[-1] == (2, {"validation_loss": 0.25})
    assert wandb.finished == 1


def test_a_tracker_that_fails_later_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", Wandb(fails_at=1))
    train(tmp_path / "run", wandb="gpts")
    assert capsys.readouterr().err == "--wandb ends here: gone\n"
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_tracker_that_cannot_begin_ends_the_run_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb(fails_at="init"))
    with pytest.raises(ValueError, match=r"^--wandb cannot begin: no account: log in first$"):
        Trackers(replace(SETTINGS, wandb="gpts"), tmp_path, 0, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"progress": "bar"}, "--progress bar needs tqdm: pip install tqdm, or pip install '.[examples]' in the"),
        ({"tensorboard": True}, "--tensorboard needs tensorboardX: pip install tensorboardX, or pip install '.[tenso"),
        ({"wandb": "gpts"}, "--wandb needs wandb: pip install wandb, or pip install '.[wandb]' in the project's folde"),
    ],
)
def test_a_missing_package_is_named_before_any_work(flags, message, monkeypatch):
    monkeypatch.setattr("distributed.run.settings.find_spec", lambda package: None)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check(replace(SETTINGS, **flags), 1)
    assert str(caught.value).startswith(message)
    check(SETTINGS, 1)

"""The full training script, run as a user runs it, small."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from jobs import LIGHTLY, ROOT, metrics_of, needs_mpirun, run_job, run_lines, write_text
from safetensors.numpy import load_file

import train_gpt
from common.train_gpt_settings import TrainSettings
from distributed import Communicator, LocalWorld, Mesh
from minigrad.generate.__main__ import read_model as load_model
from minigrad.models import GPT, gpt, gpt2
from pipeline import SCHEDULES, PipelineStage

SIZES = "--steps 4 --layers 2 --heads 2 --width 16 --context 16 --batch 12 --save-every 2"
TINY = f"{SIZES} --dropout 0.1 --dtype float64 --lr-scale embed=0.5,head=2".split(" ")
SCRIPT = str(ROOT / "examples" / "train_gpt.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*TINY, "--text", str(write_text(tmp_path_factory.mktemp("text")))]


@pytest.fixture(scope="module")
def one_process(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    result = run_job([LIGHTLY, "train_gpt", *tiny], ranks=None, cwd=tmp_path_factory.mktemp("one_process"))
    assert result.returncode == 0, result.stderr
    return result.stdout


def learned(output: str) -> str:
    """What a run prints of its model: validation loss and sample, without the start line and the speed."""
    return output[output.index("validation loss") :]


def test_it_shows_progress_a_validation_loss_and_a_sample(one_process: str) -> None:
    assert one_process.startswith("1 rank, no MPI")
    assert re.search(r"validation loss \d\.\d{3} nats a token\na trigram table gets \d\.\d{3}", one_process)
    assert "\nthe model writes:\n" in one_process


class Run(NamedTuple):
    """What a run printed, and its folder."""

    printed: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return metrics_of(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary


RUNS = {  # name -> number of ranks, and flags
    "replicas of pipelines": "4 --dp 2 --pp 2 --schedule gpipe --microbatches 2 --half-blocks",
    "pipeline": "2 --pp 2 --microbatches 3 --recompute",
    "replicas": "2 --dp 2 --lr 0.03 --lr-scale embed=1 --bucket-mb 0.01 --check-every 2",
    "not clipped": "1 --clip 0",
    "not clipped, in parts": "2 --clip 0 --dp 2 --microbatches 3 --eval-every 2",
}


@pytest.fixture(scope="module")
def runs(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Some runs of the script in different layouts, one after another in one job."""
    return run_all(RUNS, tiny, tmp_path_factory.mktemp("runs"))


def run_all(runs: dict[str, str], tiny: list[str], cwd: Path) -> dict[str, Run]:
    lines = [
        " ".join([ranks, *tiny, *flags, "--run", f"run{i}"])
        for i, (ranks, *flags) in enumerate(map(str.split, runs.values()))
    ]
    said = run_lines("train_gpt", lines, cwd)
    return {name: Run(printed, cwd / f"run{i}") for i, (name, (printed, _)) in enumerate(zip(runs, said, strict=True))}


@needs_mpirun
def test_every_layout_trains_the_same_model(one_process: str, runs: dict[str, Run]) -> None:
    """That of two replicas alone has losses that are known: see test_the_numbers_are_what_they_were."""
    assert learned(runs["replicas of pipelines"].printed) == learned(one_process)
    assert learned(runs["pipeline"].printed) == learned(one_process)


@needs_mpirun
@pytest.mark.long
def test_shards_train_the_same_model_and_go_on_in_another_layout(
    one_process: str, tiny: list[str], tmp_path: Path
) -> None:
    runs = {
        "shards": "4 --dp 2 --pp 2 --microbatches 2 --zero 2",
        "another layout": "2 --resume run0/checkpoints/step-00000002 --dp 1 --pp 2 --microbatches 3 --zero 0",
    }
    for run in run_all(runs, tiny, tmp_path).values():
        assert learned(run.printed) == learned(one_process)


@needs_mpirun
@pytest.mark.long
def test_stages_cut_within_blocks_train_the_same_model_and_go_on_cut_between_them(
    one_process: str, tiny: list[str], tmp_path: Path
) -> None:
    """Three stages, two and four, of two blocks."""
    runs = {
        "halves": "3 --pp 3 --microbatches 3 --half-blocks",
        "whole": "2 --resume run0/checkpoints/step-00000002 --dp 1 --pp 2 --no-half-blocks",
        "halves again": "2 --resume run1/checkpoints/step-00000003 --dp 1 --pp 2 --schedule zbv --half-blocks",
    }
    for run in run_all(runs, [*tiny, "--save-every", "1"], tmp_path).values():
        assert learned(run.printed) == learned(one_process)


@needs_mpirun
@pytest.mark.long
def test_exact_sums_give_one_hash_of_the_weights_in_every_layout(tiny: list[str], tmp_path: Path) -> None:
    runs = {
        "one process": "1 --microbatches 4",
        "replicas": "2 --dp 2 --microbatches 2",
        "pipeline": "2 --pp 2 --schedule 1f1b --microbatches 4",
        "another pipeline goes on": "2 --resume run1/checkpoints/step-00000002 --dp 1 --pp 2 --schedule zero_bubble_h1"
        " --microbatches 4",
    }
    exact = [*tiny, "--dtype", "float32", "--exact"]
    hashes = [
        re.findall(r"^weights ([0-9a-f]{64})$", run.printed, re.MULTILINE)
        for run in run_all(runs, exact, tmp_path).values()
    ]
    assert len(hashes[0]) == 1
    assert hashes == hashes[:1] * 4


@needs_mpirun
def test_the_timeline_shows_the_last_step_on_every_rank(runs: dict[str, Run]) -> None:
    folder = runs["replicas of pipelines"].folder
    trace = json.loads((folder / "timeline.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in range(4):
        mine = {event["name"]: event["cat"] for event in events if event["pid"] == rank}
        stage = rank % 2
        assert {name for name, category in mine.items() if category == "compute"} == {
            f"{stage}{kind}{i}" for kind in ("F", "BW") for i in range(2)
        }
        assert any(category.startswith("bucket") for category in mine.values())
    page = (folder / "timeline.svg").read_text()
    words = ("step 4 of 4", "measured", "forward", "backward", "waits", "bucket under way", "0 ms")
    assert all(f">{each}</text>" in page for each in words)
    predicted, measured = page.split(">measured</text>")
    assert predicted.count(">rank ") == measured.count(">rank ") == 4


@needs_mpirun
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--dp 3", "dp * pp must equal the number of ranks, got dp=3, pp=1 and 2 ranks"),
        ("--dp 2 --text nowhere.txt", "--text: tokens must be a file or directory that can be read, got nowhere.txt"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags: str, line: str, tmp_path: Path) -> None:
    """Before any work, and in its midst; more of them in test_examples_command_line.py."""
    result = run_job(["-m", "mpi4py", SCRIPT, *flags.split()], ranks=2, cwd=tmp_path)
    assert result.returncode == 2
    assert len(re.findall(f"^train_gpt.py: {re.escape(line)}", result.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@needs_mpirun
def test_tokens_of_another_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be, " * 40)
    result = run_job([LIGHTLY, "train_gpt", *TINY, "--text", "text", "--vocab", "300"], ranks=None, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "validation loss" in result.stdout
    assert "trigram" not in result.stdout
    result = run_job([LIGHTLY, "train_gpt", *TINY, "--text", "text", "--vocab", "100"], ranks=None, cwd=tmp_path)
    assert result.returncode == 2
    assert re.search(r"^train_gpt.py: .*100", result.stderr), result.stderr


@needs_mpirun
def test_the_numbers_are_what_they_were(runs: dict[str, Run]) -> None:
    """Every layout could leave out the same thing: clipping, a fresh dropout mask each step, a window's weight."""
    run = runs["replicas"]
    losses = [line["loss"] for line in run.metrics]
    assert losses == pytest.approx([5.547860548689599, 4.961436873899422, 4.222565230060095, 3.823816592687667], 1e-9)
    assert run.summary["validation_loss"] == pytest.approx(3.654439227898221, rel=1e-9)
    trace = json.loads((run.folder / "timeline.json").read_text())
    buckets = {event["name"] for event in trace["traceEvents"] if event.get("cat", "").startswith("bucket")}
    assert len(buckets) > 2, "--bucket-mb cuts the gradients"


@needs_mpirun
@pytest.mark.long
def test_a_run_with_compression_goes_on_bit_by_bit_and_says_what_it_sent(tiny: list[str], tmp_path: Path) -> None:
    hooks = ("int8", "powersgd", "topk")
    halfway = {f"{hook} again": f"--resume run{i}/checkpoints/step-00000002" for i, hook in enumerate(hooks)}
    named = {**dict.fromkeys(hooks, ""), **halfway}
    runs = {name: f"2 --dp 2 --compress {name.split()[0]} {resume}" for name, resume in named.items()}
    found = run_all(runs, tiny, tmp_path)
    for hook in hooks:
        lines, said = [], []
        for run in (found[hook], found[f"{hook} again"]):
            said += re.findall(r"a rank sent [\d,]+ bytes of gradients, [\d,]+ without --compress", run.printed)
            lines.append([(line["loss"], line["grad_norm"]) for line in run.metrics])
        assert len(lines[0]) == 4
        assert lines[0] == lines[1], hook
        assert said == said[:1] * 2, hook  # of the whole run


@needs_mpirun
@pytest.mark.long
def test_a_run_with_compression_goes_on_in_any_layout_and_with_any_other(tiny: list[str], tmp_path: Path) -> None:
    """What a hook keeps is of its buckets and its replicas: a run could go on with the same ones only."""
    plain = "--dp 2 --pp 1 --microbatches 1 --bucket-mb 25 --compress"
    layouts = [f"{plain} int8", f"{plain} int8 --bucket-mb 0.005", f"{plain} powersgd"]
    layouts += ["--dp 1 --pp 2 --microbatches 2 --compress int8", f"{plain} none", f"{plain} topk"]
    flags = [f"{layout} --steps {steps} --resume auto --run here" for steps, layout in enumerate(layouts, start=1)]
    said = run_lines("train_gpt", [" ".join(["2", *tiny, each]) for each in flags], tmp_path)
    anew = "what gradients have not said yet, and local steps' momentum, are of another layout: they begin anew"
    begun_anew = [step for step, (_, warned) in enumerate(said, start=1) if anew in warned]
    assert begun_anew == [2, 3, 4, 6], said  # 4 kept nothing for 5
    assert [line["step"] for line in metrics_of(tmp_path / "here")] == list(range(len(layouts)))


def test_the_learning_rate_warms_up_and_comes_down() -> None:
    rates = [train_gpt.learning_rate(TrainSettings(steps=40, lr=1.0))(step) for step in range(40)]
    assert rates[:4] == sorted(rates[:4])
    assert rates[0] <= 0.25
    assert max(rates) == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def test_the_learning_rate_and_the_rule_are_as_the_flags_say() -> None:
    settings = TrainSettings(steps=20, lr=1.0, warmup=4, lr_end=0.5, beta1=0.8, beta2=0.7, weight_decay=0.3)
    rates = [train_gpt.learning_rate(settings)(step) for step in (0, 3, 20)]
    assert rates == pytest.approx([0.25, 1.0, 0.5])
    rule = train_gpt.rule_of(settings)
    assert (rule.betas, rule.weight_decay) == ((0.8, 0.7), 0.3)
    groups = train_gpt.rule_of(replace(settings, lr_scale="embed=0.5, block1=0", optimizer="muon"))
    assert [group.rule.others.lr(3) for group in groups.groups] == [0.5, 0]
    assert [rule.lr(3) for rule in (groups.others, *(group.rule for group in groups.groups))] == [6.0, 3.0, 0]
    assert train_gpt.learning_rate(TrainSettings(steps=20, lr_end=1.0))(19) == 3e-3


@needs_mpirun
def test_a_step_becomes_a_graph_where_nothing_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIGRAD_KERNELS", raising=False)
    mpi, nccl = "Open MPI 5.0", "Open MPI 5.0 and NCCL 2.28"
    settings = TrainSettings(device="cuda", dp=2)
    assert train_gpt.becomes_graph(settings, 2, nccl)
    assert train_gpt.becomes_graph(settings, 1, mpi)
    assert train_gpt.becomes_graph(replace(settings, dp=1, pp=2), 2, nccl)
    assert not train_gpt.becomes_graph(settings, 2, mpi)
    assert not train_gpt.becomes_graph(replace(settings, graph="off"), 1, nccl)
    assert not train_gpt.becomes_graph(replace(settings, dropout=0.1), 1, nccl)
    with pytest.raises(ValueError, match=r"--graph on of 2 ranks needs NCCL .*, got messages by Open MPI 5\.0$"):
        train_gpt.becomes_graph(replace(settings, graph="on"), 2, mpi)
    monkeypatch.setenv("MINIGRAD_KERNELS", "numpy")  # whose optimizer asks the GPU
    assert not train_gpt.becomes_graph(settings, 1, nccl)


@needs_mpirun
def test_gradients_add_up_without_a_pipeline_and_evaluation_disturbs_nothing(runs: dict[str, Run]) -> None:
    whole, in_parts = runs["not clipped"], runs["not clipped, in parts"]
    plain, parts = whole.metrics, in_parts.metrics
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in plain], rel=1e-9)
    assert [line["step"] for line in parts if "validation_loss" in line] == [1, 3]
    assert parts[-1]["validation_loss"] == pytest.approx(whole.summary["validation_loss"], rel=1e-9)
    events = json.loads((in_parts.folder / "timeline.json").read_text())["traceEvents"]
    assert {"0F0", "0F1", "0F2"} <= {event["name"] for event in events}


def test_a_sample_ends_when_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpt.GPTConfig(vocab_size=7, context=4, num_layers=2, num_heads=1, width=4)

    def program(comm: Communicator) -> list[int]:
        stages = PipelineStage.of(gpt.layers(config), comm, SCHEDULES["1f1b"])
        return train_gpt.write(stages, SCHEDULES["1f1b"], np.zeros(2, np.int64), TrainSettings(context=4)).tolist()

    monkeypatch.setattr(train_gpt, "SAMPLE_TOKENS", 20)
    one, other = LocalWorld(2).run(program)
    assert len(one) == 20
    assert one == other
    monkeypatch.setattr(train_gpt, "SAMPLE_SECONDS", -1.0)
    assert LocalWorld(2).run(program) == [one[:1]] * 2


@needs_mpirun
@pytest.mark.long
def test_a_run_begins_with_another_s_weights_in_any_layout(tiny: list[str], tmp_path: Path) -> None:
    still = "--steps 1 --lr 1e-15 --weight-decay 0 --init-from run0"
    layouts = {layout: f"2 {still} --optimizer muon {layout}" for layout in ("--dp 2", "--pp 2 --microbatches 2")}
    first, *others = run_all({"first": "1", **layouts}, tiny, tmp_path).values()
    for other in others:
        assert other.summary["validation_loss"] == pytest.approx(first.summary["validation_loss"], rel=1e-9)
    for flags, words in (
        (["--heads", "1"], "--heads is 2 in --init-from run0, got 1"),
        (["--width", "32"], "--width is 16 in --init-from run0, got 32"),
        (["--init-from", "nowhere"], "--init-from must be a run, a checkpoint or GPT-2's files, got nowhere"),
    ):
        result = run_job([LIGHTLY, "train_gpt", *tiny, *still.split(), *flags], ranks=None, cwd=tmp_path)
        assert (result.returncode, result.stderr.strip()) == (2, f"train_gpt.py: {words}")


@needs_mpirun
def test_gpt_2_is_fine_tuned_from_hugging_face_s_files_in_a_pipeline(tiny: list[str], tmp_path: Path) -> None:
    """Its sizes are the folder's, so nobody has to know them."""
    config = gpt.GPTConfig(vocab_size=256, context=24, num_layers=3, num_heads=2, width=12)
    model = GPT(config, seed=5)
    gpt2.save(model.parameters(), config, tmp_path / "gpt2")
    flags = ["--text", tiny[-1], *shlex.split("--steps 1 --batch 8 --lr 1e-15 --weight-decay 0 --init-from gpt2")]
    layout = shlex.split("--pp 2 --microbatches 2 --run here")
    result = run_job(["-m", "mpi4py", LIGHTLY, "train_gpt", *flags, *layout], ranks=2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for stored in load_model(tmp_path / "here"), load_model(next((tmp_path / "here" / "checkpoints").glob("step-*"))):
        assert replace(stored.config, dropout=0.0) == config
        for ours, theirs in zip(model.parameters(), stored.parameters(), strict=True):
            np.testing.assert_allclose(ours.data, theirs.data, atol=1e-8)
    result = run_job([LIGHTLY, "train_gpt", *flags, "--width", "24"], ranks=None, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("train_gpt.py: --width is 12 in --init-from gpt2, got 24")


def test_replicas_share_the_validation_and_each_window_counts_once() -> None:
    tokens = np.arange(4 * 11 + 1)  # 11 windows, in 5 batches of 3, 2, 2, 2, 2
    seen: list[list[int]] = [[], []]

    class Pipe:
        """Gives each window its number as its loss."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def evaluate(self, x: np.ndarray, y: np.ndarray) -> float:
            seen[self.rank] += (x[:, 0] // 4).tolist()
            return float(np.mean(x[:, 0] // 4))

    class Stages:
        """Has no dropout to leave out."""

        def eval(self) -> None: ...

        def train(self) -> None: ...

    def program(comm: Communicator) -> float:
        training: Any = object.__new__(train_gpt.Training)
        training.settings, training.mesh = TrainSettings(context=4, batch=4, dp=2), Mesh(comm, dp=2, pp=1)
        training.pipe, training.stages = Pipe(comm.rank), Stages()
        loss: float = training.validation_loss(tokens)
        return loss

    assert LocalWorld(2).run(program) == [5.0, 5.0]
    assert sorted(seen[0] + seen[1]) == list(range(11))
    assert (len(seen[0]), len(seen[1])) == (7, 4)


POISONED = """
import sys
sys.path.insert(0, sys.argv[1])
import lightly
train_gpt = lightly.load("train_gpt")
DDP = train_gpt.DistributedDataParallel
clip, calls = DDP.clip_by_global_norm, []

def poisoned(ddp, max_norm):
    calls.append(ddp)
    if len(calls) in {steps} and train_gpt.world().rank == 1:
        ddp.model.counted_parameters()[0].grad[...] = float("nan")
    return clip(ddp, max_norm)

DDP.clip_by_global_norm = poisoned
sys.argv = ["train_gpt.py", *sys.argv[2:]]
train_gpt.run_script(train_gpt.main)
"""


@needs_mpirun
@pytest.mark.parametrize(("steps", "code"), [("{3}", 0), ("range(3, 99)", 2)])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(
    steps: str, code: int, tiny: list[str], tmp_path: Path
) -> None:
    """The loss is finite, so that nothing else would be seen before weights, and checkpoints from there on, are nan."""
    program = POISONED.replace("{steps}", steps)
    num_steps = "14" if code else "5"  # ten in a row are too many
    flags = [*tiny, "--steps", num_steps, "--pp", "2", "--microbatches", "2", "--run", "here", "--save-every", "1"]
    arguments = ["-m", "mpi4py", "-c", program, str(ROOT / "examples"), *flags]
    result = run_job(arguments, ranks=2, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    lines = metrics_of(tmp_path / "here")
    assert [line["grad_norm"] is None for line in lines[:5]] == [False, False, True, code == 2, code == 2]
    latest = tmp_path / "here" / "checkpoints" / (tmp_path / "here" / "checkpoints" / "latest").read_text().strip()
    weights = [load_file(part) for part in latest.glob("*.safetensors")]
    assert all(np.isfinite(array).all() for part in weights for array in part.values())
    if code == 0:
        assert json.loads((tmp_path / "here" / "summary.json").read_text())["skipped_steps"] == 1
        assert json.loads((latest / "manifest.json").read_text())["num_updates"] == 4
    else:
        said = [line for line in result.stderr.splitlines() if "steps in a row are skipped" in line]
        assert len(said) == 1
        assert "Traceback" not in result.stderr

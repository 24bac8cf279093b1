"""The settings of the example scripts: flags, and the rules between them."""

import math
import re
from dataclasses import fields, replace

import pytest

from common.train_gpt_settings import TrainSettings
from distributed.data_parallel.compression.number_formats import NUMBER_FORMATS
from distributed.run import ReplicaSettings, check, read_settings
from pipeline.schedules.schedule import SCHEDULES

COUNTS = ["steps", "batch", "save_every", "keep", "layers", "heads", "width", "context", "vocab", "dp", "pp"]


def test_defaults_fit_one_rank() -> None:
    check(TrainSettings(), 1)
    check(replace(TrainSettings(), seed=2**64 - 1), 1)  # the largest that there is


def test_each_flag_sets_its_field() -> None:
    line = (
        "--steps 3 --batch 5 --lr 0.5 --seed 9 --run folder --save-every 7 --keep 2 --progress lines --quiet"
        " --layers 6 --heads 7 --width 14 --context 8 --dropout 0.25 --text file --vocab 300 --dtype float64"
        " --dp 1 --pp 1 --schedule gpipe --microbatches 2 --bucket-mb 1.5 --optimizer muon --zero 2"
        " --check-every 3 --device cuda --warmup 2 --lr-end 0.5 --clip 3 --beta1 0.8 --beta2 0.7 --weight-decay 0.2"
        " --eval-every 2"
    )
    settings = read_settings(TrainSettings, "", line.split())
    assert settings == TrainSettings(
        steps=3,
        batch=5,
        lr=0.5,
        seed=9,
        run="folder",
        save_every=7,
        keep=2,
        progress="lines",
        quiet=True,
        layers=6,
        heads=7,
        width=14,
        context=8,
        dropout=0.25,
        text="file",
        vocab=300,
        dtype="float64",
        schedule="gpipe",
        microbatches=2,
        bucket_mb=1.5,
        optimizer="muon",
        zero=2,
        check_every=3,
        warmup=2,
        lr_end=0.5,
        clip=3.0,
        beta1=0.8,
        beta2=0.7,
        weight_decay=0.2,
        eval_every=2,
        device="cuda",
    )
    unchanged = {f.name for f in fields(TrainSettings) if getattr(settings, f.name) == f.default}
    assert unchanged == {
        "resume",
        "init_from",
        "lr_scale",
        "dp",
        "pp",
        "compress",
        "exact",
        "precision",
        "recompute",
        "half_blocks",
        "tensorboard",
        "wandb",
        "heal",
        "spares",
        "buddy_every",
        "graph",
    }


def test_only_a_pipeline_cuts_its_batch_unless_it_is_told_to() -> None:
    assert TrainSettings(pp=1).num_microbatches == 1
    assert TrainSettings(pp=2).num_microbatches == 4
    assert TrainSettings(pp=1, microbatches=8).num_microbatches == 8
    assert TrainSettings(pp=2, microbatches=8).num_microbatches == 8


@pytest.mark.parametrize(
    ("change", "world_size", "rule"),
    [
        *[({name: 0}, 1, f"--{name.replace('_', '-')} must be at least 1, got 0") for name in COUNTS],
        ({"dp": -2, "pp": -1}, 2, "--dp must be at least 1, got -2"),
        ({"dp": 2, "pp": 2}, 3, "dp * pp must equal the number of ranks, got dp=2, pp=2 and 3 ranks"),
        (
            {},
            4,
            "dp * pp must equal the number of ranks, got dp=1, pp=1 and 4 ranks; "
            "--dp 4 makes replicas, --pp 4 a pipeline",
        ),
        (
            {"dp": 2},
            1,
            "dp * pp must equal the number of ranks, got dp=2, pp=1 and 1 rank; "
            "mpirun -n 2 python -m mpi4py SCRIPT starts so many",
        ),
        ({"buddy_every": 3}, 1, "--buddy-every is for --heal replace, shrink and spares, got 3 and --heal none"),
        (
            {"pp": 5},
            5,
            "--layers must give each stage a block, got 4 for the 5 stages of 1f1b on 5 ranks; "
            "--half-blocks gives each half a one",
        ),
        ({"pp": 9}, 9, "--layers must give each stage a block, got 4 for the 9 stages of 1f1b on 9 ranks"),
        (
            {"pp": 5, "schedule": "zbv", "half_blocks": True, "microbatches": 10},
            5,
            "--layers must give each stage half a block, got 4 for the 10 stages of zbv on 5 ranks",
        ),
        (
            {"dp": 2, "pp": 2, "microbatches": 25},
            4,
            "--batch must hold a sample for each of the dp * microbatches parts, got 48 for 2 * 25",
        ),
        ({"dp": 49}, 49, "--batch must hold a sample for each of the dp * microbatches parts, got 48 for 49 * 1"),
        ({"warmup": 601}, 1, "--warmup must be at most --steps, got 601 and 600"),
        ({"lr_end": 1.5}, 1, "--lr-end must be at most 1, got 1.5"),
        ({"clip": -1.0}, 1, "--clip must be at least 0, got -1.0"),
        ({"clip": math.inf}, 1, "--clip must be finite, got inf"),
        (
            {"init_from": "a", "resume": "auto"},
            1,
            "--init-from begins a run and --resume goes on with one, got a and auto",
        ),
        *[
            (
                {"lr_scale": scale},
                1,
                "--lr-scale must be LAYER=FACTOR,... of embed, block0 to block3 and head, factors from 0, "
                f"got {scale.split(',')[-1]!r}",
            )
            for scale in ("", "tail=1", "embed", "embed=-1", "embed=nan", "head=2,block4=1", "block0=x")
        ],
        ({"lr_scale": "head=1,head=2"}, 1, "--lr-scale must name each layer once, got 'head=1,head=2'"),
        ({"heads": 3}, 1, "--width must be a multiple of --heads, got 128 and 3"),
        ({"dropout": 1.0}, 1, "--dropout must be below 1, got 1.0"),
        ({"dropout": -0.1}, 1, "--dropout must be at least 0, got -0.1"),
        ({"dropout": math.nan}, 1, "--dropout must be at least 0 and below 1, got nan"),
        ({"lr": 0.0}, 1, "--lr must be above 0, got 0.0"),
        ({"lr": math.inf}, 1, "--lr must be finite, got inf"),
        ({"seed": -1}, 1, "--seed must be at least 0, got -1"),
        ({"seed": 2**64}, 1, f"--seed must be at most {2**64 - 1}, got {2**64}"),
        ({"check_every": -1}, 1, "--check-every must be at least 0, got -1"),
        ({"bucket_mb": -1.0}, 1, "--bucket-mb must be at least 0, got -1.0"),
        ({"bucket_mb": math.inf}, 1, "--bucket-mb must be at most 2147483647, got inf"),
        ({"optimizer": "sgd"}, 1, "--optimizer must be one of adamw, muon, got sgd"),
        ({"zero": 3}, 1, "--zero must be one of 0, 1, 2, got 3"),
        (
            {"batch": 14, "exact": True},
            1,
            "--exact needs micro-batches of one size: got 14 for dp * microbatches = 4",
        ),
        (
            {"dtype": "float64", "exact": True},
            1,
            "--exact adds float32 up in float64, and nothing is wider than --dtype float64",
        ),
        ({"schedule": "zigzag"}, 1, f"--schedule must be one of {', '.join(SCHEDULES)}, got zigzag"),
        ({"device": "tpu"}, 1, "--device must be one of cpu, cuda, got tpu"),
        (
            {"compress": "int3"},
            1,
            f"--compress must be one of none, {', '.join(NUMBER_FORMATS)}, powersgd, topk, got int3",
        ),
        ({"compress": "int8", "zero": 1}, 1, "--compress int8 goes with neither --zero nor --exact"),
        ({"precision": "fp8"}, 1, "--precision must be one of auto, float32, bfloat16, float16, got fp8"),
        (
            {"precision": "float16", "zero": 1, "dp": 2},
            2,
            "--precision float16 scales whole gradients, got --zero 1",
        ),
        ({"graph": "on"}, 1, "--graph on does not go with --device cpu"),
        ({"graph": "on", "device": "cuda", "dropout": 0.1}, 1, "--graph on does not go with --dropout 0.1"),
        (
            {"graph": "on", "device": "cuda", "dp": 2, "pp": 2},
            4,
            "--graph on does not go with --dp 2 and --pp 2 together",
        ),
        (
            {"precision": "bfloat16", "dtype": "float64"},
            1,
            "--precision bfloat16 trains float32 weights, got --dtype float64",
        ),
        ({"dtype": "int8"}, 1, "--dtype must be one of float32, float64, got int8"),
        ({"progress": "pie"}, 1, "--progress must be one of auto, bar, lines, got pie"),
    ],
)
def test_broken_rules_are_named_with_their_values(change: dict[str, object], world_size: int, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        check(replace(TrainSettings(), **change), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_schedule_and_microbatches_are_allowed_with_and_without_a_pipeline(world_size: int) -> None:
    check(TrainSettings(pp=world_size, schedule="gpipe", microbatches=24), world_size)


def test_every_replica_needs_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    check(ReplicaSettings(batch=4), 4)
    monkeypatch.setattr("distributed.run.settings.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="--tensorboard needs tensorboardX"):
        check(ReplicaSettings(batch=4, tensorboard=True), 4)
    with pytest.raises(ValueError, match=r"^--batch must hold a sample for each of 5 ranks, got 4$"):
        check(ReplicaSettings(batch=4), 5)

"""Without the optional packages: what needs none runs, and what needs one says in one line what to install."""

import os
import subprocess
import sys

import pytest
from jobs import ROOT

OPTIONAL = (
    "cupy",
    "highspy",
    "jupytext",
    "matplotlib",
    "ml_dtypes",
    "numba",
    "sklearn",
    "tensorboardX",
    "tokenizers",
    "tqdm",
    "wandb",
)

# Every import of an optional package fails, and nothing finds it.
RUN = """
import importlib.util, runpy, sys

optional, sys.argv = sys.argv[1].split(","), sys.argv[2:]
found = importlib.util.find_spec

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in optional:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

importlib.util.find_spec = lambda name, package=None: None if name in optional else found(name, package)
sys.meta_path.insert(0, Missing())
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
TRAIN = (
    "examples/train_gpt.py --steps 1 --layers 1 --heads 1 --width 4 --context 4 --batch 4 --quiet --text text --run run"
)


def run(line, folder):
    (folder / "text").write_text("some text to learn, " * 20)
    first, *rest = line.split()
    command = [first, *rest] if first == "-m" else [str(ROOT / first), *rest]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", RUN, ",".join(OPTIONAL), *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_gpt_trains_without_any_and_says_what_its_pictures_lack(tmp_path):
    result = run(TRAIN, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == (
        "no plots: a plot needs matplotlib: pip install matplotlib, or pip install '.[draw]' in the project's folder\n"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "package", "extra"),
    [
        (f"{TRAIN} --progress bar", "tqdm", "examples"),
        (f"{TRAIN} --tensorboard", "tensorboardX", "tensorboard"),
        (f"{TRAIN} --wandb gpts", "wandb", "wandb"),
        (f"{TRAIN} --precision bfloat16", "ml_dtypes", "bfloat16"),
        (f"{TRAIN} --compress float8_e4m3fn", "ml_dtypes", "bfloat16"),
        (f"{TRAIN} --device cuda", "cupy-cuda12x", "cuda12"),
        ("examples/mlp_digits.py", "scikit-learn", "examples"),
        ("-m distributed.data.tokenizer text tokens", "tokenizers", "text"),
        ("-m pipeline draw 1f1b --stages 2 --microbatches 2 --png a.png", "matplotlib", "draw"),
        ("-m pipeline search --ranks 2 --exact", "highspy", "exact"),
        ("examples/notebooks/build.py", "jupytext", "notebooks"),
    ],
)
def test_what_needs_one_names_it_and_its_extra_in_one_line(line, package, extra, tmp_path):
    result = run(line, tmp_path)
    assert result.returncode == 2, result.stderr
    (said,) = result.stderr.splitlines()
    assert f"pip install {package}" in said
    assert f"pip install '.[{extra}]'" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

"""Every block of code in README.md and docs/ runs, and what is shown below a command is what it prints.

Sizes are cut down on the way: `--steps 100` becomes 3. A comment above a block says on how many ranks it runs,
`<!-- ranks: 4 -->`; those are threads, whose communicator `world()` then returns. `<!-- file: NAME -->` is what the
commands of its page find it as.
"""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from jobs import MPIRUN, ROOT, environ, write_text

import distributed
import minigrad as mg
from distributed import Communicator, DistributedDataParallel, LocalWorld, Mesh, SoloCommunicator
from minigrad.backend import use_gpu
from minigrad.models import GPT, gpt
from minigrad.optim import AdamW, Optimizer
from pipeline import BW, SCHEDULES, F, PipelineExecutor, PipelineStage

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"(?:<!-- (?:ranks: (\d+)|file: (\S+)) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
SMALL = "--layers 2 --heads 2 --width 16 --context 16 --batch 16 --text squares.txt"
LIMIT_SECONDS = 180  # several times what the longest takes on a busy machine
LONG = re.compile(r"mpirun|train_gpt|gpt_single")  # blocks that start processes, or train for a while


class Block(NamedTuple):
    """A fenced block."""

    page: Path
    number: int
    ranks: int
    file: str
    language: str
    code: str

    @property
    def above(self) -> "Block | None":
        """The block before this one on its page."""
        return blocks(self.page)[self.number - 2] if self.number > 1 else None


def blocks(page: Path) -> list[Block]:
    matches = enumerate(BLOCK.findall(page.read_text()), 1)
    return [Block(page, number, int(ranks or 1), *rest) for number, (ranks, *rest) in matches]


def of(*languages: str) -> list[Any]:
    every = [block for page in PAGES for block in blocks(page) if block.language in languages]
    return [
        pytest.param(
            block,
            id=f"{block.page.stem}-{block.number}",
            marks=[pytest.mark.long] if block.language == "slurm" or LONG.search(block.code) else [],
        )
        for block in every
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder as far as commands name its parts; what they leave behind goes away with it."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", ".venv"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_blocks_are_of_a_kind_that_is_tested() -> None:
    assert {block.language for page in PAGES for block in blocks(page)} <= {"python", "sh", "console", "slurm", "text"}


# -- Python -------------------------------------------------------------------------------------


def names(comm: Communicator) -> dict[str, Any]:
    """Return what the loops of README.md take for granted."""
    config = gpt.GPTConfig(vocab_size=11, context=5, num_layers=6, num_heads=2, width=8)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(2):
            tokens = np.random.default_rng(step).integers(0, 11, (16, 6))
            yield tokens[:, :-1], tokens[:, 1:]

    return {
        "mg": mg,
        "F": F,
        "BW": BW,
        "AdamW": AdamW,
        "Optimizer": Optimizer,
        "DistributedDataParallel": DistributedDataParallel,
        "Mesh": Mesh,
        "SCHEDULES": SCHEDULES,
        "PipelineStage": PipelineStage,
        "PipelineExecutor": PipelineExecutor,
        "gpt": gpt,
        "config": config,
        "comm": comm,
        "world": lambda **_: comm,
        "model": GPT(config),
        "batches": batches(),
        "schedule": SCHEDULES["1f1b"],
    }


@pytest.mark.parametrize("block", of("python"))
def test_python(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if 'device="cuda"' in block.code:
        try:
            use_gpu(0)
        except (ModuleNotFoundError, ValueError) as missing:
            pytest.skip(str(missing))
    program = compile(block.code, f"{block.page.name}, block {block.number}", "exec")
    worlds: dict[int, Communicator] = {}

    def run(comm: Communicator) -> None:
        worlds[threading.get_ident()] = comm
        exec(program, names(comm) | {"__name__": "__main__"})

    monkeypatch.setattr(distributed, "world", lambda **_: worlds[threading.get_ident()])
    if block.ranks == 1:
        run(SoloCommunicator())
    else:
        LocalWorld(block.ranks, timeout_seconds=30).run(run)


# -- commands -----------------------------------------------------------------------------------


def small(script: str) -> str:
    """Return commands that do the same in seconds. What is killed runs for ever, what is resumed 5 steps longer."""
    script = re.sub(r"(examples/(?:\w*gpt\w*|\w*schedule\w*)\.py)", rf"\1 {SMALL}", script)
    script = re.sub(r"--steps \d+", "--steps 6", script)
    script = re.sub(r"--steps 6(.*&)$", r"--steps 1000000\1", script, flags=re.MULTILINE)
    killed = re.search(r"--run (\S+) &$", script, flags=re.MULTILINE)
    if killed is None:
        return script
    five_more = f"$(($(wc -l < {killed[1]}/metrics.jsonl) + 5))"
    return re.sub(r"--resume auto$", f"--resume auto --steps {five_more}", script, flags=re.MULTILINE)


def run_sh(script: str, folder: Path, extra_path: Path | None = None, *, kernels: str = "numpy") -> str:
    """Run commands in bash; return what they print.

    Args:
        kernels: "" for those of a reader's machine, which take each process two seconds to load.
    """
    assert MPIRUN is not None
    path = [str(extra_path)] if extra_path else []
    path += [str(Path(MPIRUN).parent), os.environ["PATH"]]
    file = folder / "script.sh"  # not an argument: a block may kill all processes that have some words in theirs
    file.write_text(script)
    result = subprocess.run(
        ["bash", "-euo", "pipefail", str(file)],
        cwd=folder,
        env=environ() | {"PATH": os.pathsep.join(path), "MINIGRAD_KERNELS": kernels},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert result.returncode == 0, script + result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
@pytest.mark.parametrize("block", of("sh"))
def test_commands(block: Block, folder: Path) -> None:
    for other in blocks(block.page):
        if other.file:
            (folder / other.file).write_text(other.code)
    before = block.above
    if before is not None and before.language == "python" and not before.file and block.page.name == "how-to.md":
        exec(before.code, {})  # commands may go on from it
    script = re.sub(r"^make\b", "make -n", block.code, flags=re.MULTILINE)  # what they do is tested elsewhere
    run_sh(small(script), folder, kernels="" if block.page.name == "README.md" else "numpy")


@pytest.mark.parametrize("block", of("console"))
def test_commands_print_what_the_page_shows(block: Block, folder: Path) -> None:
    command, shown = block.code.removeprefix("$ ").split("\n", 1)
    assert run_sh(command, folder, kernels="") == shown


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
@pytest.mark.parametrize("block", of("slurm"))
def test_batch_scripts(block: Block, folder: Path) -> None:
    """With an srun that starts two ranks on this machine, and a layout that fits them."""
    (folder / "bin").mkdir()
    srun = folder / "bin" / "srun"
    srun.write_text(f'#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec {MPIRUN} -n 2 "$@"\n')
    srun.chmod(0o755)
    script = small(block.code).replace("--dp 4 --pp 4", "--dp 2 --pp 1 --steps 6")
    run_sh(script, folder, srun.parent)
    assert (folder / "runs" / "big" / "summary.json").exists()

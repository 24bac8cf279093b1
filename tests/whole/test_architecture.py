"""Arrows point one way: who may import whom, as a table, and the imports of every module held against it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("minigrad", "distributed", "pipeline")

ARRAYS = {"numpy", "minigrad.backend"}
TENSORS = ARRAYS | {"minigrad.tensor"}
TAPE = TENSORS | {"minigrad.tape", "minigrad.hooks", "minigrad.backward"}
LAYERS = TAPE | {"minigrad.rng", "minigrad.recompute", "minigrad.ops", "minigrad.nn"}
MESSAGES = ARRAYS | {f"distributed.{name}" for name in ("work", "reduction", "messages", "carrying")}
COMMUNICATION = MESSAGES | {"distributed.communicator"}
REDUCTION = COMMUNICATION | TAPE | {"minigrad.flat", "distributed.buckets"}
TRAINING = REDUCTION | {
    "distributed.comm_hooks",
    "minigrad.optim",
    "minigrad.lr_schedule",
    "minigrad.nn",
    "distributed.ddp",
}
# Schedules are plain Python: they can be drawn and checked where there is neither an array nor a communicator.
ORDERS = {
    f"pipeline.{name}"
    for name in ("action", "schedules", "simulate", "draw", "check", "lower", "deadlock", "text", "partition")
}
STAGES = COMMUNICATION | TAPE | ORDERS | {"minigrad.rng", "pipeline.microbatch", "pipeline.spec"}

# Module or package -> what it may import beside the standard library: modules, or packages with all that is in them.
# A module without a row of its own has that of its package. Importing a type for a hint only is free.
MAY_IMPORT: dict[str, set[str]] = {
    "minigrad.backend": {"numpy", "cupy"},
    "minigrad.tensor": ARRAYS,
    "minigrad.tape": TENSORS,
    "minigrad.watch": TENSORS | {"minigrad.tape"},
    "minigrad.hooks": {"minigrad.tensor"},
    "minigrad.backward": TENSORS | {"minigrad.tape", "minigrad.watch", "minigrad.hooks"},
    "minigrad.rng": ARRAYS,
    "minigrad.recompute": TAPE | {"minigrad.rng"},
    "minigrad.gradcheck": TAPE,
    "minigrad.functional": TAPE,
    "minigrad.ops": TAPE | {"minigrad.rng", "minigrad.ops"},
    "minigrad.nn": LAYERS | {"minigrad.flat"},
    "minigrad.models": LAYERS | {"minigrad.models"},
    "minigrad.models.gpt2": LAYERS | {"minigrad.models", "minigrad.files", "safetensors"},
    "minigrad.flat": TENSORS,
    "minigrad.optim": TENSORS | {"minigrad.flat"},
    "minigrad.lr_schedule": set(),
    "minigrad.files": set(),
    "minigrad.precision": TAPE | {"minigrad.flat"},
    "distributed.work": {"numpy"},
    "distributed.reduction": {"numpy", "distributed.work"},
    "distributed.messages": ARRAYS | {"distributed.work"},
    "distributed.carrying": ARRAYS | {"distributed.work"},
    "distributed.communicator": MESSAGES,
    "distributed.wait_clock": set(),
    "distributed.progress": {"distributed.work", "distributed.wait_clock"},
    "distributed.mpi": COMMUNICATION | {"mpi4py", "distributed.progress", "distributed.shared_memory"},
    "distributed.local": COMMUNICATION | {"distributed.wait_clock"},
    "distributed.nccl": COMMUNICATION,
    "distributed.shared_memory": COMMUNICATION | {"distributed.progress"},
    "distributed.mesh": COMMUNICATION,
    "distributed.token_files": {"numpy", "minigrad.files"},
    "distributed.data": {"numpy", "distributed.token_files"},
    "distributed.start_line": {"minigrad.backend"},
    "distributed.world": COMMUNICATION | {"distributed.mpi", "distributed.start_line"},
    "distributed.comm_hooks": COMMUNICATION,
    "distributed.buckets": REDUCTION | {"distributed.comm_hooks"},
    "distributed.ddp": REDUCTION | {"distributed.comm_hooks", "minigrad.nn"},
    "distributed.sharded": TRAINING,
    "distributed.trainer": TRAINING | {"distributed.sharded"},
    "distributed.stop": COMMUNICATION,
    "distributed.checkpoint_plan": set(),
    "distributed.checkpoint_files": {
        "safetensors",
        "distributed.checkpoint_plan",
        "distributed.messages",
        "distributed.work",
        "minigrad.files",
    },
    "distributed.checkpoint": TRAINING
    | {"distributed.sharded", "distributed.checkpoint_files", "distributed.checkpoint_plan"},
    "distributed.diagnose": TRAINING,
    "pipeline.action": set(),
    "pipeline.partition": set(),
    "pipeline.orders": {"pipeline.action"},
    "pipeline.interleaved": {"pipeline.action"},
    "pipeline.zero_bubble": {"pipeline.action"},
    "pipeline.schedules": {f"pipeline.{name}" for name in ("action", "orders", "interleaved", "zero_bubble")},
    "pipeline.simulate": {"pipeline.action"},
    "pipeline.draw": {"pipeline.action", "pipeline.simulate"},
    "pipeline.picture": {"pipeline.action", "pipeline.simulate"},
    "pipeline.png": {"pipeline.picture", "matplotlib"},
    "pipeline.trace": {"pipeline.simulate"},
    "pipeline.check": ORDERS,
    "pipeline.deadlock": {"pipeline.action"},
    "pipeline.text": ORDERS,
    "pipeline.flags": {f"pipeline.{name}" for name in ("action", "schedules", "text")},
    "pipeline.lower": {"pipeline.action"},
    "pipeline.search": ORDERS,
    "pipeline.microbatch": ARRAYS,
    "pipeline.spec": ARRAYS,
    "pipeline.measured": {f"pipeline.{name}" for name in ("action", "draw", "simulate", "trace")},
    "pipeline.record": COMMUNICATION | TAPE | {"pipeline.trace"},
    "pipeline.readiness": TAPE | {"pipeline.action"},
    "pipeline.passes": STAGES | {"pipeline.opening", "pipeline.readiness"},
    "pipeline.p2p": STAGES | {"pipeline.record"},
    "pipeline.opening": STAGES,
    "pipeline.stage": STAGES | {"minigrad.nn"},  # a stage is a Sequential of the layers that it built
    "pipeline.layer_times": STAGES | {"minigrad.nn", "pipeline.stage"},
    "pipeline.executor": STAGES
    | {"minigrad.watch"}
    | {f"pipeline.{name}" for name in ("stage", "p2p", "opening", "passes", "readiness", "record")},
    # Applications, which put the packages together as a user does.
    "pipeline.verify": {"numpy", *PACKAGES},
    "pipeline.verify_command": {"numpy", *PACKAGES},
    "pipeline.__main__": {"numpy", *PACKAGES},
    # What a package shows is all its own.
    "minigrad.__init__": {"minigrad"},
    "distributed.__init__": {"distributed"},
    "pipeline.__init__": {"pipeline"},
}

# Loading these is expensive or impossible on some machines, so each has one door.
SOLE_IMPORTER = {
    "mpi4py": "distributed.mpi",
    "cupy": "minigrad.backend",
    "matplotlib": "pipeline.png",
}


def modules(root: Path) -> dict[str, Path]:
    """Name -> file of every module; a subpackage goes by its own name, the front of a package by `name.__init__`."""
    names = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_subpackage = parts[-1] == "__init__" and len(parts) > 2
            names[".".join(parts[:-1] if is_subpackage else parts)] = path
    return names


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield each module that a file imports, also inside functions, with the line where it does."""
    package = name if path.name == "__init__.py" and not name.endswith("__init__") else name.rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield (submodule if submodule in known else base), node.lineno
        else:
            pending += ast.iter_child_nodes(node)


def row_of(name: str) -> str | None:
    """Find the row that a module falls under: its own, or else that of the nearest package around it."""
    while name and name not in MAY_IMPORT:
        name = name.rpartition(".")[0]
    return name or None


def within(target: str, prefix: str) -> bool:
    return target == prefix or target.startswith(prefix + ".")


def faults(name: str, path: Path, known: dict[str, Path]) -> list[str]:
    """List a module's forbidden imports."""
    row = row_of(name)
    if row is None:
        return [f"{name} has no row in MAY_IMPORT: say what it may know"]
    found = []
    for target, line in imports(name, path, known):
        if target.split(".")[0] in sys.stdlib_module_names:
            continue
        if not any(within(target, allowed) for allowed in MAY_IMPORT[row]):
            found.append(f"{name}, line {line}: {row} may not import {target}")
    return found


MODULES = modules(ROOT)


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_table(name: str) -> None:
    assert faults(name, MODULES[name], MODULES) == []


def test_no_module_knows_one_that_knows_it() -> None:
    graph = {
        name: {target for target, _ in imports(name, path, MODULES) if target in MODULES}
        for name, path in MODULES.items()
        if not name.endswith("__init__")
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules of the cycle


@pytest.mark.parametrize(("library", "door"), SOLE_IMPORTER.items())
def test_the_table_has_one_door_to_each_costly_library(library: str, door: str) -> None:
    assert [name for name, allowed in MAY_IMPORT.items() if library in allowed] == [door]


@pytest.mark.parametrize("package", PACKAGES)
def test_import_of_a_package_loads_no_costly_library(package: str) -> None:
    program = f"import sys, {package}; print(*sorted({set(SOLE_IMPORTER)} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("pipeline/stage.py", "from distributed.ddp import hooks", "pipeline.stage may not import distributed.ddp"),
        ("pipeline/stage.py", "from distributed import ddp", "pipeline.stage may not import distributed.ddp"),
        ("pipeline/stage.py", "import minigrad", "pipeline.stage may not import minigrad"),
        ("pipeline/draw.py", "import numpy as np", "pipeline.draw may not import numpy"),
        ("distributed/world.py", "def f():\n    from mpi4py import MPI", "distributed.world may not import mpi4py"),
        ("distributed/ddp.py", "from minigrad.ops import add", "distributed.ddp may not import minigrad.ops"),
        ("minigrad/tape.py", "try:\n    import cupy\nexcept ImportError: pass", "minigrad.tape may not import cupy"),
        ("minigrad/tape.py", "from . import ops", "minigrad.tape may not import minigrad.ops"),
        ("minigrad/ops/nn.py", "from ..nn import Linear", "minigrad.ops may not import minigrad.nn"),
        ("minigrad/ops/__init__.py", "from ..nn import Linear", "minigrad.ops may not import minigrad.nn"),
        ("minigrad/flat.py", "import torch", "minigrad.flat may not import torch"),
        ("minigrad/new.py", "", "minigrad.new has no row in MAY_IMPORT"),
    ],
)
def test_a_forbidden_import_is_refused(module: str, source: str, fault: str, tmp_path: Path) -> None:
    for path in (module, "minigrad/ops/__init__.py", "minigrad/nn/__init__.py", "distributed/ddp.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / module).write_text(source)
    known = modules(tmp_path)
    name = next(name for name, path in known.items() if path == tmp_path / module)
    found = faults(name, known[name], known)
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minigrad/tensor.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .flat import FlatBuffer"),
        ("minigrad/ops/nn.py", "import math\nfrom ..tape import op\nfrom .shape import reshape"),
        ("minigrad/__init__.py", "from .tensor import Tensor\nfrom minigrad.tape import Tape"),
        ("pipeline/verify.py", "import minigrad as mg\nfrom distributed import ddp"),
    ],
)
def test_an_import_of_the_table_passes(module: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    known = modules(tmp_path)
    (name,) = known
    assert faults(name, path, known) == []

"""Arrows point one way: which room may know which, and the imports of every module held against it.

A room is a folder: the files that lie in it, without its subfolders. Importing a type for a hint only is free, and
so is what a package's front (`__init__.py`) shows of its own package.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("minigrad", "distributed", "pipeline")


class Rule(NamedTuple):
    """What the modules of a room may import beside the standard library and each other.

    Attributes:
        knows: rooms, single modules, and libraries.
        forbids: an arrow that the rule is there to forbid, `room's module -> target`; a test sees it refused.
    """

    knows: set[str]
    forbids: str


TENSORS = {"numpy", "minigrad"}
RANKS = {"numpy", "distributed.comm", "distributed"}
BUCKETS = {f"distributed.data_parallel.{room}" for room in ("buckets", "zero", "compression")}
EVERYTHING = {"numpy", *PACKAGES, *(f"{package}.*" for package in PACKAGES)}
KERNELS = {
    f"minigrad.kernels.{family}"
    for family in (
        "activations",
        "attention",
        "decoding",
        "embedding",
        "losses",
        "norms",
        "products",
        "quantization",
        "softmax",
        "updates",
    )
}
ENGINE = TENSORS | {"minigrad.autodiff"}
TRAINED = ENGINE | {"minigrad.optim"}
RULES = {
    # Arrays and derivatives; nothing of ranks.
    "minigrad": Rule(
        {
            "numpy",
            "cupy",
            "cuda",
            "ml_dtypes",
            "msgspec",
            "minigrad.kernels",
            "minigrad.autodiff.mode",  # what a captured step runs inside of
            "minigrad.optim",
        },
        "minigrad.flat -> minigrad.autodiff.tape",
    ),
    "minigrad.autodiff": Rule(
        {"numpy", "minigrad", "minigrad.kernels"}, "minigrad.autodiff.tape -> minigrad.ops.linalg"
    ),
    "minigrad.optim": Rule(
        {"numpy", "minigrad", "minigrad.kernels"}, "minigrad.optim.optimizer -> minigrad.autodiff.tape"
    ),
    "minigrad.kernels": Rule(
        {"numpy", "numba", "llvmlite", "minigrad.backend", *KERNELS},
        "minigrad.kernels.scalars -> minigrad.tensor",
    ),
    # A family of kernels knows no other, but for products.
    **{
        family: Rule(
            {"numpy", "cudnn", "minigrad.backend", "minigrad.kernels", "minigrad.kernels.products"},
            f"{family}.cpu -> minigrad.{'parameter' if family.endswith('norms') else 'kernels.norms.reference'}",
        )
        for family in sorted(KERNELS)  # tests have these names, and every worker wants them in the same order
    },
    "minigrad.ops": Rule(ENGINE | {"minigrad.kernels"}, "minigrad.ops.nn -> minigrad.nn.layers"),
    "minigrad.nn": Rule(ENGINE | {"minigrad.ops"}, "minigrad.nn.layers -> minigrad.models.gpt"),
    "minigrad.models": Rule(
        ENGINE | {"minigrad.ops", "minigrad.nn", "safetensors", "msgspec"}, "minigrad.models.gpt -> distributed.stop"
    ),
    "minigrad.profiling": Rule(ENGINE | {"minigrad.kernels"}, "minigrad.profiling.calls -> minigrad.ops.linalg"),
    "minigrad.generate": Rule(EVERYTHING, "minigrad.generate.__main__ -> torch"),  # an application, see below
    # Ranks. Tensors and layers are known where parameters are, ops nowhere.
    "distributed.comm": Rule(
        {
            "numpy",
            "minigrad.backend",
            "minigrad.kernels",
            "minigrad.words",
            "distributed.comm.mpi.communicator",  # what `world` starts
            "distributed.comm.mpi.lifetime",
            "distributed.comm.nccl.communicator",
        },
        "distributed.comm.calls -> distributed.comm.mpi.progress",
    ),
    "distributed.comm.local": Rule(
        {"numpy", "distributed.comm"}, "distributed.comm.local.job -> distributed.comm.mpi.progress"
    ),
    "distributed.comm.nccl": Rule(
        {"numpy", "minigrad.backend", "distributed.comm"},
        "distributed.comm.nccl.messages -> distributed.comm.mpi.progress",
    ),
    "distributed.comm.mpi": Rule(
        {"numpy", "mpi4py", "minigrad.backend", "minigrad.words", "distributed.comm"},
        "distributed.comm.mpi.reduction -> minigrad.tensor",
    ),
    "distributed": Rule(
        {"numpy", "minigrad", "minigrad.nn", "minigrad.optim", "distributed.comm", "distributed.data"},
        "distributed.stop -> distributed.data_parallel.ddp",
    ),
    "distributed.data_parallel": Rule(
        RANKS | TRAINED | BUCKETS | {"minigrad.nn", "distributed.trace"},
        "distributed.data_parallel.ddp -> minigrad.ops.linalg",
    ),
    "distributed.data_parallel.buckets": Rule(
        RANKS | TRAINED | {"distributed.trace", "distributed.data_parallel.comm_hooks"},
        "distributed.data_parallel.buckets.manager -> distributed.data_parallel.zero.shards",
    ),
    "distributed.data_parallel.zero": Rule(
        RANKS | TRAINED | {"distributed.data_parallel.buckets", "distributed.data_parallel.comm_hooks"},
        "distributed.data_parallel.zero.shards -> distributed.data_parallel.ddp",
    ),
    "distributed.data_parallel.compression": Rule(
        RANKS | TRAINED | {"minigrad.nn", "minigrad.kernels", "distributed.data_parallel.buckets", "ml_dtypes"},
        "distributed.data_parallel.compression.feedback -> distributed.data_parallel.local_steps",
    ),
    "distributed.checkpoint": Rule(
        RANKS | TRAINED | {"minigrad.nn", "safetensors", "msgspec"},
        "distributed.checkpoint.files -> minigrad.ops.linalg",
    ),
    "distributed.recovery": Rule(
        RANKS | TRAINED | {"minigrad.nn"}, "distributed.recovery.attempts -> distributed.data_parallel.ddp"
    ),
    "distributed.data": Rule(
        {
            "numpy",
            "tokenizers",
            "minigrad.backend",
            "minigrad.command_parser",
            "minigrad.extras",
            "minigrad.files",
            "minigrad.words",
        },
        "distributed.data.batches -> distributed.comm.world",
    ),
    "distributed.trace": Rule(
        RANKS | {"minigrad.autodiff.hooks"}, "distributed.trace.recorder -> pipeline.schedules.action"
    ),
    # Stages and micro-batches. Schedules are plain Python, at run time too.
    "pipeline.schedules": Rule({"pipeline.schedules.drawing"}, "pipeline.schedules.simulate -> numpy"),
    "pipeline.schedules.drawing": Rule(
        {"pipeline.schedules", "matplotlib"}, "pipeline.schedules.drawing.text -> numpy"
    ),
    "pipeline.runtime": Rule(
        RANKS | TRAINED | {"minigrad.nn", "distributed.trace", "pipeline.schedules"},
        "pipeline.runtime.stage -> distributed.data_parallel.ddp",
    ),
    # Applications, which put the packages together as a user does.
    "distributed.run": Rule(
        EVERYTHING | {"msgspec", "matplotlib", "tqdm", "tensorboardX", "wandb"}, "distributed.run.run -> torch"
    ),
    "pipeline": Rule(EVERYTHING, "pipeline.verify -> torch"),
    "pipeline.cli": Rule(EVERYTHING, "pipeline.cli.flags -> matplotlib"),
}

# Loading these is expensive or impossible on some machines, so each has one door.
SOLE_IMPORTER = {
    "mpi4py": "distributed.comm.mpi.communicator",
    "cupy": "minigrad.backend",
    "numba": "minigrad.kernels.compiling",
    "llvmlite": "minigrad.kernels.compiling",
    "cuda": "minigrad.backend",
    "cudnn": "minigrad.kernels.attention.cudnn_attention",
    "matplotlib": "pipeline.schedules.drawing.png, distributed.run.plots",
}


def modules(root: Path) -> dict[str, Path]:
    """Name -> file of every module; the front of a package is `name.__init__`."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield each module that a file imports, also inside functions, with the line where it does."""
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                is_module = submodule in known or f"{submodule}.__init__" in known
                yield (submodule if is_module else base), node.lineno
        else:
            pending += ast.iter_child_nodes(node)


def room_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def faults(name: str, path: Path, known: dict[str, Path]) -> list[str]:
    """List a module's forbidden imports."""
    room = room_of(name)
    if room not in RULES:
        return [f"{room} has no rule: say what it may know"]
    return [
        f"{name}, line {line}: {'imports are absolute' if target[0] == '.' else f'{room} may not know {target}'}"
        for target, line in imports(path, known)
        if not _allowed(name, room, target, known)
    ]


def _allowed(name: str, room: str, target: str, known: dict[str, Path]) -> bool:
    package = target.split(".")[0]
    if package in sys.stdlib_module_names:
        return True
    if name.endswith(".__init__") and target.startswith(room + "."):
        return True
    is_front = f"{target}.__init__" in known
    rooms = {package} if package not in PACKAGES else {target} if is_front else {target, room_of(target)}
    knows = RULES[room].knows | {room}
    return bool(rooms & knows) or any(target.startswith(each[:-1]) for each in knows if each.endswith(".*"))


MODULES = modules(ROOT)


@functools.cache
def targets(name: str) -> set[str]:
    """Return what a module imports."""
    return {target for target, _ in imports(MODULES[name], MODULES)}


def test_a_module_knows_what_its_room_may_know() -> None:
    assert [fault for name, path in MODULES.items() for fault in faults(name, path, MODULES)] == []


def test_no_module_knows_one_that_knows_it() -> None:
    graph = {
        name: {target for target in targets(name) if target in MODULES}
        for name in MODULES
        if not name.endswith("__init__")
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules of the cycle


@pytest.mark.parametrize("room", RULES)
def test_a_rule_refuses_the_arrow_that_it_is_there_to_forbid(room: str, tmp_path: Path) -> None:
    name, target = RULES[room].forbids.split(" -> ")
    assert room_of(name) == room
    path = tmp_path / "module.py"
    path.write_text(f"def late():\n    import {target}\n")
    assert faults(name, path, MODULES) == [f"{name}, line 2: {room} may not know {target}"]


def test_every_rule_is_of_a_room_that_there_is() -> None:
    assert {room_of(name) for name in MODULES} == set(RULES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from minigrad import ops", "minigrad may not know minigrad.ops"),
        ("try:\n    import torch\nexcept ImportError: pass", "minigrad may not know torch"),
        ("from . import tensor", "imports are absolute"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import minigrad.ops", ""),
        ("import math\nfrom minigrad.tensor import Tensor", ""),
    ],
)
def test_how_imports_are_read(source: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [fault.partition(": ")[2] for fault in faults("minigrad.flat", path, MODULES)] == [found] * bool(found)


@pytest.mark.parametrize(("library", "door"), SOLE_IMPORTER.items())
def test_a_costly_library_has_one_door(library: str, door: str) -> None:
    importers = {name for name in MODULES if library in {target.split(".")[0] for target in targets(name)}}
    assert importers <= set(door.split(", "))


@pytest.mark.parametrize("package", PACKAGES)
def test_import_of_a_package_loads_no_costly_library(package: str) -> None:
    assert loaded_by(f"import {package}") & {*SOLE_IMPORTER, "safetensors"} <= {"safetensors"}


def test_import_of_minigrad_leaves_to_numpy_what_it_loads_when_first_asked() -> None:
    program = "import minigrad, sys; print('numpy.random' in sys.modules, '_hashlib' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout == "False False\n", result.stderr


def test_schedules_need_no_numpy() -> None:
    rooms = [name for name in MODULES if name.startswith("pipeline.schedules.") and not name.endswith("__init__")]
    assert "numpy" not in loaded_by(
        "import pipeline.schedules, pipeline; " + "; ".join(f"import {name}" for name in rooms)
    )


def loaded_by(program: str) -> set[str]:
    """Return which top-level modules a fresh Python has loaded after `program`."""
    program += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    return set(result.stdout.split())


def test_no_module_is_hidden_by_something_of_its_own_name() -> None:
    for name in MODULES:
        whole = name.removesuffix(".__init__")
        if "." in whole and not whole.endswith("__main__"):
            import_module(whole)
            parent, _, own = whole.rpartition(".")
            assert isinstance(getattr(import_module(parent), own), ModuleType), whole

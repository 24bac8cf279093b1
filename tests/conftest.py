"""The `ranks` fixture: one test over many worlds.

    def test_allreduce_sums(ranks):
        def program(comm): ...      # runs on every rank
        results = ranks.run(program)    # by rank, on every rank

Outside mpirun `ranks` is, in turn, a single rank and worlds of threads. Under mpirun it is MPI with the ranks that
there are, every other test is deselected, rank 0 alone writes, and a failure on any rank prints its rank and ends the
job: a rank that has failed would leave the others waiting. Nothing collective happens outside `ranks.run`.

Threads and the processes of `make check` (WORLDS in the Makefile) share the worlds of 2, 3 and 4 ranks between them, so
that a test runs in each of them once, on this side or on that:

                        threads                                 processes
    any test            3 4                                     2 3 4
    point_to_point      2 and 4 with synchronous sends, 3       2, 3 with synchronous sends, 4

    @pytest.mark.ranks(2, 4)            exactly these sizes; under mpirun skipped at any other
    @pytest.mark.point_to_point         also in worlds whose sends complete only when they are received
    @pytest.mark.every_world            threads of every size and of both kinds: for tests of communicators
    pytest --synchronous-sends          every world is of that kind
    pytest --deterministic              under mpirun, sums in rank order; threads always sum so
    pytest --unchecked-collectives      under mpirun, ranks do not compare their calls, as in a user's run
    pytest --nccl                       under mpirun, each rank takes a GPU, and GPU arrays go through NCCL
    pytest --one-card -k captured       under mpirun, two ranks share a GPU: see one_card.py
"""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed import (
    Communicator,
    LocalWorld,
    SoloCommunicator,
    launched_by_mpi,
    launcher_rank,
    local_rank,
    world,
)
from minigrad.backend import use_gpu

UNDER_MPI = launched_by_mpi()
MPI_WORLD = pytest.StashKey[Communicator]()
TIMEOUT_SECONDS = 30.0
TAKES_RANKS = re.compile(r"def test_[^)]*\branks\b")
# Files of more than 10 seconds of CPU that start no processes, which would tell that they take long.
LONGEST = {
    *("test_equality", "test_pipeline_trainer", "test_recovery", "test_checkpoint_layouts", "test_sharded"),
    *("test_executor", "test_executor_forwards", "test_executor_memory", "test_schedules"),
}


class ProcessRanks:
    """What LocalWorld is to threads, for the ranks that are processes: run(program), size, synchronous_sends."""

    def __init__(self, comm: Communicator, *, synchronous_sends: bool = False) -> None:
        self.size = comm.size
        self.synchronous_sends = synchronous_sends
        self._comm = comm

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        own = self._comm.duplicate()  # no message of one test can meet the next test's
        results = self._comm.gather_objects(program(own, *args))
        own.free()
        return results


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--synchronous-sends", action="store_true", help="no send completes before its receive is posted")
    parser.addoption("--deterministic", action="store_true", help="MPI's ranks sum in rank order, as threads always do")
    parser.addoption("--unchecked-collectives", action="store_true", help="MPI's ranks do not compare their calls")
    parser.addoption("--nccl", action="store_true", help="each of MPI's ranks takes a GPU of its own, and uses NCCL")
    parser.addoption("--one-card", action="store_true", help="two of MPI's ranks share a GPU as if each had its own")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): run `ranks` at exactly these sizes")
    config.addinivalue_line("markers", "point_to_point: run `ranks` also with sends that complete only when received")
    config.addinivalue_line("markers", "every_world: run `ranks` on threads of every size and of both kinds")
    config.addinivalue_line("markers", "mpi: uses `ranks`, and so runs under mpirun too (set automatically)")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # from nohup, and from some CI
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, to themselves and to jobs
    if UNDER_MPI:
        # A rank's temporary folders lie apart: in one place pytest may find another rank's as that one removes it.
        root = Path(tempfile.gettempdir(), f"pytest-rank-{launcher_rank()}")
        root.mkdir(exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)
        if config.getoption("--nccl"):
            use_gpu(local_rank())
        config.stash[MPI_WORLD] = world(
            gpus=config.getoption("--nccl"),
            synchronous_sends=config.getoption("--synchronous-sends"),
            deterministic=config.getoption("--deterministic"),
            timeout_seconds=TIMEOUT_SECONDS,
            check_collectives=not config.getoption("--unchecked-collectives"),
        )
        if config.getoption("--one-card"):
            from one_card import OneCard

            config.stash[MPI_WORLD] = OneCard(config.stash[MPI_WORLD])
        if launcher_rank() != 0:
            config.pluginmanager.unregister(name="terminalreporter")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under mpirun, leave out files without a test of `ranks`: to import them all takes each rank ten seconds."""
    if UNDER_MPI and collection_path.suffix == ".py" and not TAKES_RANKS.search(collection_path.read_text()):
        return True
    return None


def pytest_collection() -> None:
    gc.disable()  # half a million objects are made, and none is garbage


def pytest_collection_finish() -> None:
    """Let no later collection go through the tests themselves: of 14,000 of them it takes half a second each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def young_heap() -> None:
    """Let a test's collections go through what it makes alone: through all that a worker has, each takes 0.2 s."""
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        worlds = {"mpi": None} if UNDER_MPI else _thread_worlds(metafunc)
        metafunc.parametrize("ranks", worlds.values(), ids=worlds.keys(), indirect=True)


def _thread_worlds(metafunc: pytest.Metafunc) -> dict[str, ProcessRanks | LocalWorld]:
    marked = metafunc.definition.get_closest_marker
    marker = marked("ranks")
    worlds: dict[str, ProcessRanks | LocalWorld] = {} if marker else {"solo": ProcessRanks(SoloCommunicator())}
    for size in marker.args if marker else (2, 3, 4):
        if metafunc.config.getoption("--synchronous-sends"):
            kinds = [True]
        elif marked("every_world"):
            kinds = [False, True] if marked("point_to_point") else [False]
        elif marked("point_to_point"):
            kinds = [size % 2 == 0]
        else:
            kinds = [False] if marker or size > 2 else []
        for synchronous_sends in kinds:
            worlds[f"{'synchronous_sends' if synchronous_sends else 'local'}-{size}"] = LocalWorld(
                size, synchronous_sends=synchronous_sends, timeout_seconds=TIMEOUT_SECONDS
            )
    return worlds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("mpi")
    if UNDER_MPI:
        kept = [item for item in items if item.get_closest_marker("mpi")]
        config.hook.pytest_deselected(items=[item for item in items if not item.get_closest_marker("mpi")])
        items[:] = kept
    items.sort(key=turn)  # what takes longest first, so that all workers end together


def turn(item: pytest.Item) -> int:
    """Say when this test's file has its turn: long ones, those that start other processes, and then the others."""
    if item.path.stem in LONGEST:
        return 0
    module = getattr(item, "module", None) or item
    return 1 if {"MPIRUN", "run_job", "subprocess"} & vars(module).keys() else 2


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[ProcessRanks | LocalWorld]:
    if not UNDER_MPI:
        yield request.param
        return
    comm = request.config.stash[MPI_WORLD]
    marker = request.node.get_closest_marker("ranks")
    if marker and comm.size not in marker.args:
        pytest.skip(f"needs {' or '.join(map(str, marker.args))} ranks, mpirun started {comm.size}")
    yield ProcessRanks(comm, synchronous_sends=request.config.getoption("--synchronous-sends"))
    comm.barrier()


def pytest_exception_interact(node: pytest.Item | pytest.Collector, report: Any) -> None:
    if UNDER_MPI:
        node.config.stash[MPI_WORLD].abort(f"{report.nodeid}\n{report.longreprtext}")

"""The communicator that this process was started with: MPI under a launcher, a single rank otherwise.

Nothing here imports mpi4py unless a launcher's environment says that there are ranks: importing it starts MPI, which
takes a second.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import NoReturn

from distributed.comm.communicator import Communicator
from distributed.comm.mpi.lifetime import NEWCOMER, starting
from distributed.comm.outcome import note_end
from distributed.comm.settings import LaunchError, Settings, check_timeout
from distributed.comm.solo import SoloCommunicator
from distributed.comm.topology import describe_places, this_place

# How launchers tell a process its rank: Open MPI; srun --mpi=pmix; MPICH, Intel MPI and srun --mpi=pmi2.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# What tells one launch from another: the job and the rank, or the socket to the launcher.
_LAUNCH_VARIABLES = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_FD", "PMI_PORT", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID")
_RANK_PROCESS = "MINIGRAD_RANK_PROCESS"  # which process is the rank of a launch, for those that it starts
_CHECK_VARIABLE = "MINIGRAD_CHECK_COLLECTIVES"
# What Open MPI is told, unless the environment says something else.
_OPEN_MPI = {
    # Parts for one-sided messages between hosts, which nobody sends here: the first complains where it finds no network
    # card, the second looks a second for one, in the start of each rank, and of each that takes a dead one's place.
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "^ofi",
    # Over TCP a larger message asks first, and is sent when the answer has been seen: two looks at MPI later, which in
    # a backward are milliseconds apart. Buckets of gradients, and what stages send, go at once.
    "OMPI_MCA_btl_tcp_eager_limit": str(1 << 20),
}
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def world(
    *,
    synchronous_sends: bool = False,
    deterministic: bool = False,
    timeout_seconds: float = 600.0,
    progress_thread: bool = False,
    check_collectives: bool | None = None,
    survive: bool = False,
    gpus: bool = False,
) -> Communicator:
    """Return the communicator of all ranks of this job.

    Collective. Under MPI it also makes an uncaught exception on any rank end the job, so call it early: until then
    it is left to the launcher to end the other ranks, which Open MPI's does and MPICH's does not. A script that a rank
    starts is no rank of the job but a single one, unless it has a launcher of its own.

    Args:
        synchronous_sends: no send completes before its receive is posted; shows programs that rely on buffering.
        deterministic: sums are taken in rank order: the same bits in every run and from every MPI. Sends as much as
            MPI's own reductions would, in two phases.
        timeout_seconds: the longest that a rank waits for others; then it says for what, and ends the job.
        progress_thread: a thread moves messages while this rank computes, where nobody calls `progress()`.
        check_collectives: ranks compare each collective before it starts; where they make different ones, all raise
            RuntimeError with both calls and their lines. Costs one small message a call. By default as the environment
            says: MINIGRAD_CHECK_COLLECTIVES=1. `LocalWorld` always compares.
        survive: the death of a rank raises RankFailure on the others, who can go on: see `distributed.recovery`. Needs
            Open MPI 5 under `mpirun --with-ft ulfm`.
        gpus: collectives of GPU arrays, and messages between the ranks of a pipeline, go through NCCL, if each rank has
            a GPU of its own, its current one. They begin and end on the GPU: no rank waits for them on the host, so no
            timeout ends them; a message that nobody sends has one.
    Raises:
        ValueError: timeout_seconds is not above 0.
        LaunchError: a launcher started several ranks, and the MPI library of mpi4py sees one: they are of two MPIs; or
            this MPI cannot do what is asked.
    """
    check_timeout(timeout_seconds)
    if not launched_by_mpi():
        return SoloCommunicator()
    for name, value in _OPEN_MPI.items():
        os.environ.setdefault(name, value)
    with starting():
        from distributed.comm.mpi.communicator import mpi_world

    settings = Settings(
        synchronous_sends=synchronous_sends,
        deterministic=deterministic,
        timeout_seconds=timeout_seconds,
        progress_thread=progress_thread,
        survive=survive,
        check_collectives=_environment_flag(_CHECK_VARIABLE) if check_collectives is None else check_collectives,
    )
    os.environ[_RANK_PROCESS] = f"{os.getpid()} {_launch(os.environ)}"
    comm = mpi_world(settings)
    size = launcher_size()
    if comm.size == 1 and size is not None and size > 1:
        raise LaunchError(
            f"ranks need the launcher of their own MPI, but {_launcher(os.environ)} started {size} ranks and each is "
            f"alone in {comm.library}, which mpi4py loads"
        )
    if gpus:
        from distributed.comm.nccl.communicator import with_nccl

        return with_nccl(comm)
    return comm


def exit_together(status: int) -> NoReturn:
    """End this process as every other rank ends too, for the same reason.

    `python -m mpi4py` takes an exit status of one rank for its failure, and aborts the job, which an MPI tells at
    length. Here nobody is left waiting, so it need not.
    """
    if launched_by_mpi():
        note_end(status)  # which a world that has healed could not tell its launcher
    if "mpi4py.MPI" in sys.modules:
        from distributed.comm.mpi.communicator import finalize_at_exit

        finalize_at_exit()
    sys.exit(status)


def _environment_flag(variable: str, environ: Mapping[str, str] = os.environ) -> bool:
    value = environ.get(variable, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, got {value!r}")
    return value == "1"


def launched_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an MPI launcher (mpirun, mpiexec, srun) started this process.

    False in a process that one of its ranks started.
    """
    if _started_by_a_rank(environ):
        return False
    # A Slurm step of one task may be a person's interactive shell, and needs no MPI either way.
    in_slurm_step = int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    return in_slurm_step or any(variable in environ for variable in _RANK_VARIABLES)


def _started_by_a_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process has the launcher's variables from a rank, whose place in MPI it must not take."""
    pid, _, launch = environ.get(_RANK_PROCESS, "").partition(" ")
    if not pid or int(pid) == os.getpid() or launch != _launch(environ):
        return False  # a rank, perhaps of a launcher that a rank has started
    forked = int(pid) == os.getppid() and "mpi4py.MPI" in sys.modules
    return forked or not _is_socket(environ.get("PMI_FD"))  # their numbers may repeat; who starts a script closes them


def _is_socket(descriptor: str | None) -> bool:
    try:
        return descriptor is not None and stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except OSError:
        return False


def _launch(environ: Mapping[str, str]) -> str:
    return ",".join(environ.get(variable, "") for variable in _LAUNCH_VARIABLES)


def _launcher(environ: Mapping[str, str]) -> str:
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "Open MPI's mpirun"
    return "a launcher of MPICH's kind (PMI_SIZE)" if "PMI_SIZE" in environ else "srun"


def launcher_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank before MPI has started, 0 outside a launcher.

    It decides who prints an argument error.
    """
    if not launched_by_mpi(environ):
        return 0
    return next(int(environ[variable]) for variable in (*_RANK_VARIABLES, "SLURM_PROCID") if variable in environ)


def launcher_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks there are before MPI has started.

    1 outside a launcher; None where it does not say.
    """
    if not launched_by_mpi(environ):
        return 1
    return next((int(environ[variable]) for variable in _SIZE_VARIABLES if variable in environ), None)


def is_newcomer(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process takes the place of a rank that died.

    It can be asked before MPI has started.
    """
    return NEWCOMER in environ


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's place among the ranks of its host.

    0 outside a launcher. It says which GPU to take.
    """
    return next((int(environ[variable]) for variable in _LOCAL_RANK_VARIABLES if variable in environ), 0)


def describe(comm: Communicator, device: str = "cpu") -> str:
    """Describe the ranks for a start line.

    `2 ranks on 1 host, Open MPI v5.0.11, 1 thread and 8 cores a rank, cpu`. Collective. It warns at the end where ranks
    are in each other's way; see `describe_places`.

    Args:
        device: where this rank's arrays are: "cpu", or "cuda" for the current GPU, whose name the line gives.
    """
    return describe_places(comm.gather_objects(this_place(device)), comm.library)

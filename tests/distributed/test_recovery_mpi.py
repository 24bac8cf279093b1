"""Real kills: ranks that are processes die of SIGKILL, and the run ends with the bits of the undisturbed one."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from jobs import MPIRUN, ROOT, environ, start, survives_deaths
from toy_recovery import builder, digest, train

from distributed import LocalWorld
from distributed.recovery.stderr_filter import without_noise

PROGRAM = """
import json, os, signal, sys
from toy_recovery import builder, digest, train
from distributed import world
from distributed.comm.mpi import family
from distributed.recovery import Heal

dies, pp, how = json.loads(sys.argv[1])
if "MINIGRAD_LOST_AT" in os.environ:  # the launcher has started the job again: now all live
    dies = {}
if how.pop("spawn_fails", False):
    family.MPIFamily._with_newcomers = lambda *_: family.lose("as the test says")
signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
number = signals[how.pop("signal", "kill")]
dies = {int(rank): tuple(moment) for rank, moment in dies.items()}
if "heal" in how:
    how["heal"] = Heal(how["heal"])
comm = world(survive=True, deterministic=True, timeout_seconds=60)
hurries = how.pop("hurries", None)  # the step after which rank 0 waits 5 s at most, as no other rank is late before

def on_step(step):
    if step == hurries and comm.rank == 0 and dies:
        comm._engine.timeout_seconds = comm._family._timeout_seconds = 5

die = lambda: os.kill(os.getpid(), number)
parameters, losses, recoveries = train(comm, builder(pp), dies=dies, die=die, on_step=on_step, **how)
if parameters:  # of a spare that was not needed there are none
    print(json.dumps([comm.rank, *digest(parameters), [r.source for r in recoveries]]), flush=True)
"""


pytestmark = pytest.mark.skipif(not survives_deaths(), reason="needs Open MPI with ULFM")


def run(folder, num_ranks, dies, pp=1, says="", **how):
    """Run the program on ranks that die; return (name of the first parameter, digest) and the sources, over ranks.

    Args:
        says: what the launcher says of it.
    """
    script = folder / "program.py"
    script.write_text(PROGRAM)
    given = json.dumps([dies, pp, how])
    command = [sys.executable, "-m", "distributed.recovery", "-n", str(num_ranks), str(script), given]
    result = ended(command, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.fullmatch(says, said_by_the_launcher(result.stderr)), result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    return {tuple(line[1:3]) for line in lines}, {source for line in lines for source in line[3]}, lines


def ended(command, folder):
    """Run a job to its end, with a limit of time."""
    with start(command, folder, new_session=True) as job:
        try:
            stdout, stderr = job.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)  # the launcher, with which all its ranks end
            raise
    # Open MPI passes a zero on now and then, before the words of a rank, where another died.
    return subprocess.CompletedProcess(command, job.returncode, stdout.replace("\0", ""), stderr)


def said_by_the_launcher(stderr):
    """Return its lines, where no rank ended in an error; what Open MPI has to say of the dead may be new to anybody."""
    assert "Traceback" not in stderr, stderr
    return "\n".join(line for line in stderr.splitlines() if line.startswith("python -m distributed.recovery: "))


def undisturbed(num_ranks, pp=1):
    """What threads end with, which sum in rank order too."""
    return {digest(result[0]) for result in LocalWorld(num_ranks).run(train, builder(pp))}


def test_replicas_are_replaced_to_the_same_bits(tmp_path):
    found, sources, lines = run(tmp_path, 3, {1: (1, "hook"), 0: (2, "reduced")})
    assert found == undisturbed(3)
    assert sources == {"a living rank"}
    assert sorted(line[0] for line in lines) == [0, 1, 2]


@pytest.mark.long
def test_two_die_at_once_and_a_pipeline_is_whole_again(tmp_path):
    found, sources, _ = run(tmp_path, 4, {0: (1, "hook"), 3: (1, "begin")}, pp=2)
    assert (found, sources) == (undisturbed(4, 2), {"a living rank"})


def test_a_stage_comes_back_from_its_buddy(tmp_path):
    found, sources, _ = run(tmp_path, 2, {1: (2, "hook")}, pp=2, buddy_every=1)
    assert (found, sources) == (undisturbed(2, 2), {"a buddy's copy"})


def test_the_others_go_on(tmp_path):
    found, sources, lines = run(tmp_path, 3, {2: (1, "committed")}, heal="shrink")
    assert len(found) == 1
    assert sources == {"a living rank"}
    assert sorted(line[0] for line in lines) == [0, 1]


@pytest.mark.long
def test_a_spare_steps_in(tmp_path):
    """The fifth rank takes the place of the second, and the bits are those of four; then no spare is left."""
    found, sources, lines = run(tmp_path, 5, {1: (1, "hook")}, pp=2, heal="spares", num_spares=1)
    assert (found, sources) == (undisturbed(4, 2), {"a living rank"})
    assert sorted(line[0] for line in lines) == [0, 2, 3, 4]


AGAIN = r"python -m distributed.recovery: the job was lost after {} steps? \((?:{})\): all ranks start again"


@pytest.mark.long
def test_where_mpi_cannot_heal_all_ranks_start_again_where_they_were(tmp_path):
    says = AGAIN.format(2, "as the test says")
    found, sources, lines = run(tmp_path, 3, {1: (2, "hook")}, says=says, spawn_fails=True)
    assert (found, sources) == (undisturbed(3), {"the job before"})
    assert sorted(line[0] for line in lines) == [0, 1, 2]


@pytest.mark.long
def test_when_every_rank_is_killed_it_begins_again(tmp_path):
    found, sources, _ = run(
        tmp_path, 2, {0: (1, "begin"), 1: (1, "begin")}, says=AGAIN.format(1, "every rank died|.* died of .*")
    )
    assert (found, sources) == (undisturbed(2), {"the beginning"})


@pytest.mark.long
def test_a_rank_that_hangs_is_found_by_the_time_limit(tmp_path):
    says = AGAIN.format(2, r"\[rank 0\] TimeoutError: no rank may wait longer than 5 s.*")
    found, sources, _ = run(tmp_path, 2, {1: (2, "hook")}, says=says, signal="stop", hurries=1)
    assert (found, sources) == (undisturbed(2), {"the job before"})


WAITS = """
import os, signal, time
import numpy as np
from mpi4py import MPI
from toy_recovery import builder
from distributed import world
from distributed.comm.failure import Heal, RankFailure
from distributed.comm.mpi.family import MPIFamily
from distributed.data_parallel.compression.low_rank import PowerSGD
from distributed.recovery.buddies import Buddies
from distributed.recovery.state import state_of

is_deaf, made = int(os.environ["OMPI_COMM_WORLD_RANK"]) < 2, []

class Noted(MPI.Intracomm):
    def Dup(self, *how):
        return note(super().Dup(*how))
    def Split(self, *how):
        return note(super().Split(*how))
    def Split_type(self, *how):
        return note(super().Split_type(*how))
    def Get_failed(self):
        return MPI.GROUP_EMPTY if is_deaf else super().Get_failed()

def note(comm):
    made.append(Noted(comm))
    return made[-1]

init = MPIFamily.__init__
MPIFamily.__init__ = lambda self, mpi, world, *rest, **how: init(self, mpi, note(world), *rest, **how)

comm = world(survive=True, timeout_seconds=20, deterministic=True, check_collectives=True)
everybody = comm._family.world.Get_group()
toys = [builder(2, zero=2)(comm), builder(2, hook=lambda: PowerSGD(1))(comm)]
buddies = Buddies(comm, state_of(toys[0]))
pair = comm.split(int(comm.rank in (0, 3)))
shared = pair.buffer(1000, np.float64)
comm.split(comm.rank // 3).split(0).duplicate()
assert comm.vote(True)
assert not comm.vote(comm.rank != 2)
try:
    if comm.rank == 0:
        waits = []
        for i, each in enumerate(made):
            if each == MPI.COMM_NULL:  # done with, and freed
                continue
            with_me = [rank for rank in MPI.Group.Translate_ranks(everybody, [1, 2], each.Get_group()) if rank >= 0]
            if with_me:
                waits.append((i, each.Irecv(np.empty(1), with_me[0], 77)))
        assert len(waits) > 20, len(waits)
        comm.send(np.ones(1), dest=3, tag=1)  # which may die now
        end = time.monotonic() + 40
        while waits and time.monotonic() < end:
            for wait in [*waits]:
                try:
                    wait[1].Test()
                except MPI.Exception:
                    waits.remove(wait)
        assert not waits, f"nobody revoked {[i for i, _ in waits]} of {len(made)} communicators"
        comm.barrier()
    elif comm.rank == 1:
        pair.allreduce(shared).wait()  # in memory, where MPI sees nothing
    elif comm.rank == 2:
        comm.recv(np.empty(1), source=3, tag=0)
    else:
        comm.recv(np.empty(1), source=0, tag=1)
        time.sleep(0.5)  # the other two most likely wait by then
        os.kill(os.getpid(), signal.SIGKILL)
except RankFailure:
    assert not comm.vote(True)
    print([comm.rank, comm.heal(Heal.SHRINK).gather_objects(comm.rank)], flush=True)
"""


def test_every_communicator_of_the_family_is_revoked(tmp_path):
    """Ranks that nobody has told of a death hear of it by that alone, as where a network tells the neighbours only.

    And by the vote, which has one outcome, whatever a rank knows by itself. Rank 0 waits in every communicator that
    anything has made, rank 1 in shared memory; each for a rank that lives and has left, since it has seen the death.
    """
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    result = ended([sys.executable, "-m", "distributed.recovery", "-n", "4", str(script)], tmp_path)
    assert (result.returncode, said_by_the_launcher(result.stderr)) == (0, ""), result.stderr
    assert sorted(result.stdout.split("\n")[:-1]) == [f"[{rank}, [0, 1, 2]]" for rank in range(3)]


def test_a_bug_ends_the_job(tmp_path):
    script = tmp_path / "bug.py"
    script.write_text(
        "from distributed import world\ncomm = world(survive=True)\nassert comm.rank != 1, 'a bug'\ncomm.barrier()\n"
    )
    command = [sys.executable, "-m", "distributed.recovery", "-n", "2", str(script)]
    result = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60)
    assert result.returncode not in (0, 137)
    assert "[rank 1] AssertionError: a bug" in result.stderr


def test_without_the_switch_one_line_says_what_is_missing(tmp_path):
    # A script said it in a traceback, and ended with 1 as for an error of its own.
    script = tmp_path / "plain.py"
    imports = "from distributed import world\nfrom distributed.run import run_script\n"
    script.write_text(imports + "run_script(lambda: world(survive=True))\n")
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "mpi4py", str(script)]
    result = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    line = "plain.py: a world that survives failures needs Open MPI 5 under `mpirun --with-ft ulfm`, which `python -m"
    assert result.stderr.startswith(line), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"prterun noticed that process rank 1 exited on\n", b""),
        (b"\0NBC_Progress: an error\n", b""),
        # libevent's, in mpirun, where a rank dies that it is about to write to.
        (b"[warn] Epoll MOD(1) on fd 21 failed. Old events were 6; Bad file descriptor\n", b""),
        (b"[warn] no Epoll\n", b"[warn] no Epoll\n"),
        (b"Error in NBC_Start_round() (-1)\n", b""),
        (b"Error in NBC_Start_round\n", b"Error in NBC_Start_round\n"),
        (b"[vm:27920] pmix_ptl_base: send_msg: write failed: Broken pipe (32) [sd = 20]\n", b""),
        (
            b"[vm][[1,2],0][btl_tcp_frag.c:241:f] mca_btl_tcp_frag_recv: readv failed: Connection reset by peer (4)\n",
            b"",
        ),
        (b"[vm:2] [[3,0],0] oob:tcp: send_msg: write failed: Broken pipe (32) [sd = 2]\n", b""),
        (b"[vm:2] pmix_ptl_base: out of memory\n", b"[vm:2] pmix_ptl_base: out of memory\n"),
        (b"[rank 1] BrokenPipeError: Broken pipe\n", b"[rank 1] BrokenPipeError: Broken pipe\n"),
        (b"-" * 78 + b"\n", b""),
        (b"signal 14 (Alarm clock).\n", b""),
        # Its writer ends it with no newline: twice, and before the words of a rank.
        (b"LAUNCHER JOB OBJECT NOT FOUNDLAUNCHER JOB OBJECT NOT FOUND", b""),
        (b"LAUNCHER JOB OBJECT NOT FOUND[rank 1] KeyError: 7\n", b"[rank 1] KeyError: 7\n"),
        (b"LAUNCHER JOB OBJECT NOT FOUNDprterun noticed that\n", b""),
        (b"[rank 1] KeyError: 'prterun noticed'\n", b"[rank 1] KeyError: 'prterun noticed'\n"),
        (b"signal 9 (Killed). Or not\n", b"signal 9 (Killed). Or not\n"),
        (b"no end", b"no end"),
    ],
)
def test_what_the_launcher_says_of_the_dead_is_left_out_and_nothing_else(line, said):
    assert without_noise(line) == said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "0", "x.py"], "-n must be at least 1, got 0"),
        (["-n", "2", "no-such.py"], "there is no file no-such.py"),
        (["-n", "two", "x.py"], "-n must be an integer, got 'two'"),
        ([], "the following arguments are required: -n, script"),
    ],
)
def test_the_command_says_what_is_wrong(flags, message):
    command = [sys.executable, "-m", "distributed.recovery", *flags]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (2, f"python -m distributed.recovery: {message}\n")

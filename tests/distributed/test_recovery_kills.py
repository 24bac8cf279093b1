"""SIGKILLs from outside, at moments that nobody chose: in a step, a reduction, a recovery, of rank 0, of two at once.

Whatever they hit, each run ends as a success, with the bits of the undisturbed one, and leaves no process behind. Where
kills hit the making of a new world the launcher starts the job again. State that is nowhere any more is made again from
the beginning, so that even then the bits are the same.
"""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from jobs import environ, start, survives_deaths
from toy_recovery import builder, digest, train

from distributed import LocalWorld
from distributed.comm.mpi import lifetime
from distributed.comm.outcome import FOLDER, NEWCOMERS, is_running

NUM_STEPS = 120
LAST_KILL = 80  # no kill once this step was seen
HELD_AT = 100  # until then: a kill that is late would come when all is over
LIMIT_SECONDS = 110

PROGRAM = f"""
import json, os, sys, time
from toy_recovery import builder, digest, train
from distributed import world

pp, schedule, buddy_every = json.loads(sys.argv[1])
comm = world(survive=True, deterministic=True, timeout_seconds=60)
print(f"rank {{comm.rank}} is {{os.getpid()}}", flush=True)

def on_step(step):
    time.sleep(0.02)
    if comm.rank == 0:
        print(f"step {{step}}", flush=True)
    while step >= {HELD_AT} and not os.path.exists("enough"):
        time.sleep(0.01)

parameters, _, _ = train(comm, builder(pp, schedule), num_steps={NUM_STEPS}, on_step=on_step, buddy_every=buddy_every)
print(json.dumps(digest(parameters)), flush=True)
"""

STUCK = """
import ctypes, signal, sys
from distributed.comm.mpi import lifetime

lifetime.STUCK_SECONDS = 0.2
with lifetime.dead_if_stuck():
    pass
assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
print("left in time", flush=True)
with lifetime.dead_if_stuck():
    ctypes.PyDLL(None).sleep(50)  # with Python's lock held, as mpi4py starts MPI
"""


def test_a_process_that_is_stuck_is_killed_even_with_pythons_lock_held():
    result = subprocess.run([sys.executable, "-c", STUCK], env=environ(), capture_output=True, text=True, timeout=40)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGALRM, "left in time\n", "")


def test_only_a_newcomer_that_dies_meanwhile_loses_the_job(tmp_path, monkeypatch):
    # One that was killed as it joined a world left its number there, and the next recovery took it for its own.
    monkeypatch.setenv(FOLDER, str(tmp_path))
    reasons = []
    monkeypatch.setattr(lifetime, "lose", reasons.append)
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    (tmp_path / NEWCOMERS).mkdir()
    for newcomer in (first, second):
        (tmp_path / NEWCOMERS / str(newcomer.pid)).touch()
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
    with lifetime.lost_if("it did not start", seconds=600, dies=[os.getpid()]):
        time.sleep(0.3)
        assert reasons == []
        second.kill()
        end = time.monotonic() + LIMIT_SECONDS
        while not reasons and time.monotonic() < end:
            time.sleep(0.01)
    assert set(reasons) == {f"it did not start: process {second.pid} died meanwhile"}
    first.wait()
    second.wait()


def shoot(folder, kills, seed, *, pp=1, schedule="1f1b", buddy_every=0, ranks=4):
    """Train on ranks that are killed so many times; check how it ends, and return how many there were."""
    script, dice = folder / "program.py", random.Random(seed)
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "distributed.recovery", "-n", str(ranks), str(script)]
    command.append(json.dumps([pp, schedule, buddy_every]))
    lines, said, done = queue.Queue(), [], 0
    with start(command, folder, new_session=True) as job:
        errors = []
        readers = [
            threading.Thread(target=lambda: [lines.put(line) for line in job.stdout]),
            threading.Thread(target=lambda: errors.extend(job.stderr)),
        ]
        for reader in readers:
            reader.start()
        pids, step, next_kill, end = {}, -1, None, time.monotonic() + LIMIT_SECONDS
        while job.poll() is None:
            if time.monotonic() > end:
                end_all(job.pid, pids.values())
                pytest.fail(f"seed {seed}: it hangs after {done} kills, at step {step}: {errors}")
            with suppress(queue.Empty):
                line = lines.get(timeout=0.01).replace("\0", "")
                said.append(line)
                if line.startswith("rank "):
                    pids[int(line.split()[1])] = int(line.split()[3])
                elif line.startswith("step "):
                    step = int(line.split()[1])
                    if step >= LAST_KILL:
                        (folder / "enough").touch()
                    next_kill = next_kill or time.monotonic() + dice.uniform(0, 0.5)
                continue
            living = [pid for pid in pids.values() if is_running(pid)]
            if next_kill and time.monotonic() > next_kill and done < kills and step < LAST_KILL and len(living) > 2:
                for pid in dice.sample(living, 2 if len(living) == ranks and dice.random() < 0.2 else 1):
                    with suppress(ProcessLookupError):  # a launcher that starts all again was faster
                        os.kill(pid, signal.SIGKILL)
                        done += 1
                next_kill = time.monotonic() + dice.uniform(0.0, 3.0)
        for reader in readers:
            reader.join()
    said += list(lines.queue)
    started = [int(line.split()[3]) for line in said if line.startswith("rank ")]
    assert not [pid for pid in started if is_running(pid)], f"seed {seed}, {done} kills"
    assert job.returncode == 0, f"seed {seed}, {done} kills: {errors}"
    note(f"seed {seed} pp {pp} {schedule}: {done} kills, {[line for line in errors if line.strip()]}")
    found = {tuple(json.loads(line)) for line in said if line.startswith("[")}
    assert found == undisturbed(ranks, pp, schedule), f"seed {seed}, {done} kills"
    return done


def end_all(session, pids):
    """Kill what is left of a job: the launchers, by their group, and the ranks, which have groups of their own."""
    for send, target in [(os.killpg, session), *((os.kill, pid) for pid in pids)]:
        with suppress(ProcessLookupError):
            send(target, signal.SIGKILL)


def note(line):
    """Add a line to the file that KILL_LOG names, to count afterwards how jobs healed."""
    if "KILL_LOG" in os.environ:
        with open(os.environ["KILL_LOG"], "a") as log:
            log.write(line + "\n")


def undisturbed(ranks, pp, schedule):
    results = LocalWorld(ranks).run(lambda comm: train(comm, builder(pp, schedule), num_steps=NUM_STEPS))
    return {digest(result[0]) for result in results}


LAYOUTS = {
    "replicas": {},
    "four-stages": {"pp": 4, "buddy_every": 5},
    "two-stages": {"pp": 2},
    "zbv": {"pp": 2, "schedule": "zbv", "buddy_every": 10},
}


@pytest.mark.soak
@pytest.mark.skipif(not survives_deaths(), reason="needs Open MPI with ULFM")
@pytest.mark.parametrize("seed", range(int(os.environ.get("KILL_SEEDS", "10"))))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills_at_any_moment(tmp_path, layout, seed):
    assert shoot(tmp_path, 5, seed, **LAYOUTS[layout]) >= 3

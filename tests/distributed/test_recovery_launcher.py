"""The launcher of jobs that may be lost: when it starts one again, when it does not, and what it passes on of stderr.

Its `mpirun` is a script that plays one job after the other, as a file counts them.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jobs import environ

from distributed.comm.outcome import FOLDER, LOST, is_running, note_end, read_end
from distributed.recovery import launcher
from distributed.recovery.__main__ import mpi_without_healing
from distributed.recovery.launcher import GIVEN_UP, MOST_TRIES, Launcher
from distributed.recovery.rescue import LOST_AT, Rescue, begin_steps, read_steps
from distributed.recovery.state import Extent, Snapshot
from distributed.recovery.stderr_filter import pass_on

LIMIT_SECONDS = 30

JOB = """
import os, pathlib, signal, sys, time

folder, count = pathlib.Path(os.environ["MINIGRAD_JOB_FOLDER"]), pathlib.Path("count")
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
assert ("MINIGRAD_LOST_AT" in os.environ) == (number > 0)
steps = int.from_bytes((folder / "steps").read_bytes(), sys.byteorder)

def get_on(to):
    (folder / "steps").write_bytes(to.to_bytes(8, sys.byteorder))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def lose(why):
    os.write(2, f"\\nminigrad-job-lost: {why}\\n".encode())
    time.sleep(600)

"""


def launch(folder, script):
    """Return the exit code, how often the job was started, and what the launcher said."""
    fake = folder / "mpirun"
    fake.write_text(f"#!{sys.executable} -I\n{JOB}{script}")
    fake.chmod(0o755)
    said = []
    code = Launcher([str(fake)], dict(os.environ), said.append).run()
    return code, int((folder / "count").read_text()), said


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_job_that_ends_is_not_started_again(tmp_path):
    assert launch(tmp_path, "sys.exit(0)") == (0, 1, [])


def test_an_error_is_the_end(tmp_path):
    assert launch(tmp_path, "sys.exit(3)") == (3, 1, [])


@pytest.mark.parametrize(("noted", "code"), [("", 0), ("0", 0), ("2", 2)])
def test_ranks_that_came_to_their_end_need_no_mpirun_to_say_so(tmp_path, noted, code):
    assert launch(tmp_path, f"(folder / 'ended').write_text('{noted}'); die()") == (code, 1, [])


def test_a_job_that_was_killed_goes_on(tmp_path):
    code, starts, said = launch(tmp_path, "number or (get_on(7), die())")
    assert (code, starts) == (0, 2)
    assert said == ["the job was lost after 7 steps (mpirun died of SIGKILL): all ranks start again"]


@pytest.mark.parametrize("code", [137, 139, 142])
def test_so_does_one_whose_ranks_were_killed_or_crashed(tmp_path, code):
    ended, starts, said = launch(tmp_path, f"number or sys.exit({code})")
    assert (ended, starts) == (0, 2)
    assert f"a rank died of {signal.Signals(code - 128).name}" in said[0]


def test_mpirun_may_call_it_a_success_that_all_ranks_were_killed(tmp_path):
    code, starts, said = launch(tmp_path, "number or (folder / 'begun').touch()")
    assert (code, starts) == (0, 2)
    assert said == ["the job was lost after 0 steps (every rank died): all ranks start again"]


def test_what_a_lost_job_noted_is_forgotten(tmp_path):
    script = """
if number:
    assert not (folder / "newcomers").exists() and not (folder / "begun").exists()
    sys.exit(0)
(folder / "newcomers").mkdir()
(folder / "newcomers" / "1234567").touch()
(folder / "begun").touch()
(folder / "left").touch()
die()
"""
    assert launch(tmp_path, script)[:2] == (0, 2)


@pytest.mark.parametrize("code", [130, 143])
def test_a_signal_that_asked_for_the_end_is_one(tmp_path, code):
    assert launch(tmp_path, f"sys.exit({code})") == (code, 1, [])


def test_a_signal_between_two_jobs_ends_the_second(tmp_path):
    # It was sent to the job that had ended, and the next one ran on.
    fake = tmp_path / "mpirun"
    fake.write_text(f"#!{sys.executable} -I\n{JOB}number or die(); time.sleep(5)")
    fake.chmod(0o755)
    code = Launcher([str(fake)], dict(os.environ), lambda _: os.kill(os.getpid(), signal.SIGTERM)).run()
    assert code == -signal.SIGTERM


def test_ranks_say_that_they_are_lost_and_why(tmp_path, capfd):
    code, starts, said = launch(tmp_path, "number or lose('new ranks did not start')")
    assert (code, starts) == (0, 2)
    assert said == ["the job was lost after 0 steps (new ranks did not start): all ranks start again"]
    assert LOST not in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's children")
@pytest.mark.parametrize(("ended", "starts"), [("", 2), ("(folder / 'ended').write_text('0')", 1)])
def test_an_mpirun_that_all_ranks_have_left_is_ended(tmp_path, monkeypatch, ended, starts):
    # Its children are never asked about, as when it waits for a lock: zombies. A living one is enough to wait for.
    monkeypatch.setattr(launcher, "_BEREAVED_SECONDS", 0.3)
    script = f"""
import subprocess
if number == 0:
    {ended or "pass"}
    get_on(3)
    for seconds in (0.8, 0):
        subprocess.Popen(["sleep", str(seconds)])
    time.sleep(600)
"""
    begin = time.monotonic()
    code, found, said = launch(tmp_path, script)
    assert (code, found) == (0, starts)
    assert time.monotonic() - begin > 0.8
    lost = "the job was lost after 3 steps (mpirun outlived its ranks and did not end): all ranks start again"
    assert said == [lost] * (starts - 1)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's children")
def test_an_mpirun_that_is_late_after_its_ranks_came_to_their_end_is_waited_for(tmp_path, monkeypatch):
    # On a busy machine a job that had ended well was killed and done again.
    monkeypatch.setattr(launcher, "_BEREAVED_SECONDS", 0.1)
    script = """
import subprocess
(folder / "begun").touch()
(folder / "left").touch()
subprocess.Popen(["sleep", "0.5"]).wait()
time.sleep(2)
"""
    assert launch(tmp_path, script) == (0, 1, [])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's children")
@pytest.mark.parametrize(
    ("begun", "program", "library", "starts"),
    [
        (False, "mpi4py", "libmpi.so.40", 2),
        (True, "mpi4py", "libmpi.so.40", 1),
        (False, "what reaches a host", "libmpi.so.40", 1),
        (False, "mpi4py", "libm.so.6", 1),
    ],
)
def test_a_rank_that_dies_before_there_is_a_world_is_not_waited_for(
    tmp_path, monkeypatch, begun, program, library, starts
):
    """The others would wait for it in MPI's start; once they have met, they see it themselves.

    Ranks of a script without a world, which never loads MPI, were taken for dead where one ended five seconds before
    the others, and the script was started eleven times.
    """
    monkeypatch.setattr(launcher, "_BEREAVED_SECONDS", 0.2)
    Path(library).write_text("what a process that has loaded it has in its memory")
    # One rank lives as long as this mpirun. Others die, each when the launcher has most likely seen it.
    script = f"""
import subprocess
if number == 0:
    {"(folder / 'begun').touch(); (folder / 'left').touch()" if begun else "pass"}
    loads = "import mmap, sys; file = open('{library}'); loaded = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)"
    command = [sys.executable, "-c", loads + "; sys.stdin.read()", {program!r}]
    survivor = subprocess.Popen(command, stdin=subprocess.PIPE)
    for _ in range({40 if starts == 2 else 2}):
        rank = subprocess.Popen(command, stdin=subprocess.PIPE)
        time.sleep(0.5)
        rank.kill()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
"""
    code, found, said = launch(tmp_path, script)
    assert (code, found) == (0, starts)
    lost = "the job was lost after 0 steps (a rank died before all had met): all ranks start again"
    assert said == [lost] * (starts - 1)


def test_a_job_that_does_no_step_is_given_up(tmp_path):
    code, starts, said = launch(tmp_path, "die()")
    assert (code, starts) == (GIVEN_UP, MOST_TRIES + 1)
    assert said[-1].endswith(f"and {MOST_TRIES} times before without a step between: it is given up")


def test_a_job_that_gets_on_is_not(tmp_path):
    more = MOST_TRIES + 2
    code, starts, _ = launch(tmp_path, f"number == {more} or (get_on(steps + number % 2), die())")
    assert (code, starts) == (0, more + 1)


def test_whoever_ends_the_launcher_ends_the_job(tmp_path):
    """As asked by SIGTERM or SIGINT, which is no loss; where the launcher is killed, as no rank may be left alone."""
    fake = tmp_path / "mpirun"
    fake.write_text(f"#!{sys.executable} -I\n{JOB}\npathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)")
    fake.chmod(0o755)
    run = f"from distributed.recovery.launcher import *; import os; Launcher(['{fake}'], dict(os.environ), print).run()"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen([sys.executable, "-c", run], env=environ()) as launcher:
            wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
            pid = int((tmp_path / "pid").read_text())
            assert os.getpgid(pid) != os.getpgid(launcher.pid)  # or a terminal's Ctrl-C would come to it twice
            launcher.send_signal(number)
            launcher.wait(LIMIT_SECONDS)
        wait_until(lambda pid=pid: not is_running(pid))
        assert (tmp_path / "count").read_text() == "1"
        (tmp_path / "pid").unlink()
        (tmp_path / "count").unlink()


def test_a_signal_that_comes_as_the_job_is_started_ends_it(tmp_path, monkeypatch):
    # It came before the launcher knew its job, so nobody passed it on, and the job ran to its end.
    start = subprocess.Popen

    def start_and_be_told(*args, **how):
        job = start(*args, **how)
        wait_until(lambda: (tmp_path / "count").exists() and (tmp_path / "count").read_text())
        signal.raise_signal(signal.SIGTERM)
        return job

    monkeypatch.setattr(subprocess, "Popen", start_and_be_told)
    assert launch(tmp_path, "time.sleep(10)") == (-signal.SIGTERM, 1, [])


def wait_until(come):
    end = time.monotonic() + LIMIT_SECONDS
    while not come():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_ranks_leave_is_found_by_those_that_come_after(tmp_path, monkeypatch):
    begin_steps(tmp_path)
    rescue = Rescue(tmp_path)
    assert (rescue.lost_at, rescue.num_steps_before, rescue.read(0, 1)) == (None, 0, [])
    rescue.count(8)
    a, b = {Extent("a", 0, 3): np.arange(3.0)}, {Extent("b", 0, 2): np.ones(2)}
    rescue.keep([Snapshot(8, 8, {"position": 3}, frozenset(), a), Snapshot(5, 5, {}, frozenset(), b)])
    assert (read_steps(tmp_path), read_steps(tmp_path / "none")) == (8, 0)
    monkeypatch.setenv(LOST_AT, "12.5")
    after = Rescue(tmp_path)
    assert (after.lost_at, after.num_steps_before) == (12.5, 8)
    first, second = after.read(0, 2)
    assert (first.step, first.data, second.step) == (8, {"position": 3}, 5)
    np.testing.assert_array_equal(first.arrays[Extent("a", 0, 3)], [0, 1, 2])
    assert after.read(1, 2) == []  # there is one file, and the first rank of this host has it
    after.clear(0.0)
    assert len(after.read(0, 1)) == 2  # it is newer
    after.clear(time.time() + 1)
    assert after.read(0, 1) == []


def test_an_error_of_all_ranks_is_noted_over_their_end(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    note_end(2)
    note_end()
    assert (tmp_path / "ended").read_text() == "2"


def test_who_is_killed_as_it_notes_the_end_takes_no_other_ones_note_along(tmp_path, monkeypatch):
    # It had emptied the file, which then meant that all was well.
    monkeypatch.setenv(FOLDER, str(tmp_path))
    note_end(2)

    def killed(file, text):
        file.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        note_end(2)
    assert read_end(tmp_path) == 2


def passed_on(*chunks):
    """Return what has come through after each chunk, and the reasons of a loss."""
    source, end = os.pipe()
    left, so_far, after, reasons = [*chunks], bytearray(), [], []

    class Sink:
        def write(self, data):
            so_far.extend(data)

        def flush(self):
            after.append(bytes(so_far))
            feed()

    def feed():
        if left:
            os.write(end, left.pop(0))
        elif len(after) == len(chunks):
            os.close(end)

    feed()
    pass_on(source, Sink(), reasons.append)
    os.close(source)
    return after[:-1], reasons


def test_a_progress_bar_comes_through_before_its_line_ends():
    after, _ = passed_on(b"step 1 |", b"##\rstep 2 |###", b"\nsaid\n")
    assert after == [b"step 1 |", b"step 1 |##\rstep 2 |###", b"step 1 |##\rstep 2 |###\nsaid\n"]


def test_what_may_become_noise_waits_for_its_end():
    after, _ = passed_on(b"prterun not", b"iced that\nprter", b"iffic\n")
    assert after == [b"", b"", b"prteriffic\n"]
    after, _ = passed_on(b"[vm:2] [[3,", b"0],0] oob:", b"tcp: send_msg: write failed: Broken pipe\nbar |", b"\n")
    assert after == [b"", b"", b"bar |", b"bar |\n"]


@pytest.mark.parametrize("bar", [b"[##  ] 10%", b"[rank 1] 10%", b"[00:01<00:02]", b"[12:30:01] loss", b"[1/9] x"])
def test_a_bar_that_begins_with_a_bracket_comes_through(bar):
    after, _ = passed_on(bar, b"\n")
    assert after == [bar, bar + b"\n"]


def test_a_loss_is_told_and_not_shown():
    after, reasons = passed_on(b"bar |#", f"\n{LOST}no ".encode(), b"new ranks\nsaid\n")
    assert (after[-1], reasons) == (b"bar |#\nsaid\n", ["no new ranks"])


@pytest.mark.parametrize(
    ("version", "other"),
    [
        ("mpirun (Open MPI) 5.0.11\n", None),
        ("mpirun (Open MPI) 4.1.4\n", "Open MPI 4.1.4"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "MPICH"),
        ("Intel(R) MPI Library", "another MPI"),
    ],
)
def test_an_mpi_that_cannot_heal_is_named_before_it_starts(version: str, other: str | None) -> None:
    # MPICH's mpirun does not know --with-ft: it explained its flags, and the launcher took that for a job that was
    # lost, eleven times.
    assert mpi_without_healing(version) == other

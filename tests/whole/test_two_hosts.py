"""A rank is killed, or the cable between two hosts is cut, in the middle of a step: everything ends, within seconds.

The hosts are network namespaces of this machine, made by `benchmarks/two_hosts`, which needs root.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import MPIRUN, ROOT, needs_mpirun, run_job

TWO_HOSTS = ROOT / "benchmarks" / "two_hosts"
TIMEOUT_SECONDS = 10  # more than one rank is late on a busy machine: else it ends before the cable is cut
CUT_OFF_SECONDS = 3  # of the rank that cuts the cable, which can no longer be late
GRACE_SECONDS = 60  # to start, and to be cut off where an Abort blocks

SOURCE = """
    import os
    import signal
    import subprocess
    from pathlib import Path

    import numpy as np

    import minigrad as mg
    from distributed import DistributedDataParallel, world
    from minigrad.models import MLP

    comm = world(timeout_seconds={timeout})
    Path(f"rank{{comm.rank}}").write_text(str(os.getpid()))
    print("hosts:", *comm.gather_objects(os.uname().nodename), flush=True)
    model = MLP([64, 64, 8])
    ddp = DistributedDataParallel(model, comm, bucket_bytes=4096)
    optimizer = mg.optim.Optimizer(model.parameters(), mg.optim.SGD(0.1))

    def cut():
        here, _ = os.environ["TWO_HOSTS"].split()
        subprocess.run(["ip", "-n", here, "link", "set", "cable", "down"], check=True)
        comm._engine.timeout_seconds = {cut_off}

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def disturb(parameter):
        if step == 3 and comm.rank == {rank} and parameter.name == "fc1.weight":
            {disturbance}()

    for step in range(10):
        optimizer.zero_grad()
        loss = mg.mean(model(np.ones((4, 64), np.float32)))
        mg.backward_with_hooks(loss, ddp.hooks(num_samples=4), on_grad_ready=disturb)
        ddp.wait()
        optimizer.step()
"""


def write_script(folder: Path, disturbance: str, rank: int) -> str:
    script = folder / "train.py"
    values = {"timeout": TIMEOUT_SECONDS, "cut_off": CUT_OFF_SECONDS, "disturbance": disturbance, "rank": rank}
    script.write_text(textwrap.dedent(SOURCE).format(**values))
    return str(script)


def alive(folder: Path) -> list[str]:
    """Return the ranks whose processes are there; in the beginning, those that have not started."""

    def is_alive(rank: str) -> bool:
        try:
            os.kill(int((folder / rank).read_text()), 0)
        except ProcessLookupError:
            return False
        except (FileNotFoundError, ValueError):  # not there yet, or not written yet
            return True
        return True

    return [rank for rank in ("rank0", "rank1") if is_alive(rank)]


def wait_for_the_end(folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS + GRACE_SECONDS
    while left := alive(folder):
        said = (folder / "output").read_text() if (folder / "output").exists() else ""
        assert time.monotonic() < deadline, f"still there: {left}\n{said}"
        time.sleep(0.1)


@contextmanager
def job_on_two_hosts(script: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a script on two hosts, one rank each; whatever is left in the end is killed. Output goes to `output`."""
    assert MPIRUN is not None
    command = [str(TWO_HOSTS), MPIRUN, "-n", "2", sys.executable, script]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield job
        finally:
            job.terminate()
            job.wait(GRACE_SECONDS)


@pytest.fixture(scope="module")
def two_hosts() -> None:
    """Skip where there are no two hosts, and say why."""
    if MPIRUN is None or b"(Open MPI) 5" not in subprocess.run([MPIRUN, "--version"], capture_output=True).stdout:
        pytest.skip("needs the mpirun of Open MPI 5")
    trial = subprocess.run([TWO_HOSTS, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"no two hosts to be had here: {trial.stderr.strip()}")
    for _ in range(3):  # of some hundred times Open MPI's daemon and mpirun do not come to an end once
        with subprocess.Popen([TWO_HOSTS, MPIRUN, "-n", "2", "hostname"], stdout=subprocess.PIPE, text=True) as job:
            try:
                names, _ = job.communicate(timeout=GRACE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                job.terminate()
    else:
        pytest.fail("mpirun did not end on two hosts, three times")
    assert sorted(names.split()) == ["host1", "host2"]  # or all that follows would be shown on one


@needs_mpirun
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(tmp_path: Path, rank: int) -> None:
    result = run_job([write_script(tmp_path, "kill", rank)], ranks=2, cwd=tmp_path)
    assert result.returncode != 0
    wait_for_the_end(tmp_path)


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_on_both_hosts(tmp_path: Path, rank: int) -> None:
    with job_on_two_hosts(write_script(tmp_path, "kill", rank), tmp_path) as job:
        assert job.wait(GRACE_SECONDS) != 0
        wait_for_the_end(tmp_path)
        assert "hosts: host1 host2" in (tmp_path / "output").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("two_hosts")
def test_a_cut_cable_ends_the_ranks_on_both_hosts(tmp_path: Path) -> None:
    with job_on_two_hosts(write_script(tmp_path, "cut", 0), tmp_path):
        wait_for_the_end(tmp_path)  # of the ranks: mpirun itself waits for the daemon on the other host
        output = (tmp_path / "output").read_text()
    assert "hosts: host1 host2" in output
    assert f"[rank 0] TimeoutError: no rank may wait longer than {CUT_OFF_SECONDS} s" in output


@pytest.mark.usefixtures("two_hosts")
def test_each_host_has_a_folder_for_temporary_files() -> None:
    # In a common one what a killed daemon of Open MPI had left stopped another with its process number.
    where = "printenv TMPDIR; $PRTE_MCA_plm_ssh_agent 10.77.0.2 printenv TMPDIR"
    result = subprocess.run([TWO_HOSTS, "sh", "-c", where], capture_output=True, text=True, check=True)
    assert [Path(folder).name for folder in result.stdout.split()] == ["host1", "host2"]
    assert not any(Path(folder).exists() for folder in result.stdout.split())  # in the end


@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_leaves_nothing_behind() -> None:
    def namespaces() -> str:
        return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout

    job = subprocess.Popen([TWO_HOSTS, "sh", "-c", "echo started; sleep 60"], stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout is not None
        assert job.stdout.readline() == "started\n"
        assert f"minigrad-{job.pid}-1" in namespaces()
        job.terminate()
        assert job.wait(GRACE_SECONDS) == 143
    assert f"minigrad-{job.pid}" not in namespaces()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "two_hosts: needs a command"), (["--rate"], "two_hosts: --rate needs a value, such as 100mbit")],
)
def test_two_hosts_says_what_is_missing(arguments: list[str], message: str) -> None:
    result = subprocess.run([TWO_HOSTS, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_needs_a_core_for_each() -> None:
    core = min(os.sched_getaffinity(0))
    result = subprocess.run(
        ["taskset", "-c", str(core), TWO_HOSTS, "true"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "two_hosts: needs two cores, got 1" in result.stderr


@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_needs_its_tools(tmp_path: Path) -> None:
    for tool in ("id", "ip", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    environ = os.environ | {"PATH": str(tmp_path)}
    result = subprocess.run([TWO_HOSTS, "true"], env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "two_hosts: needs tc: install iproute2 and util-linux" in result.stderr


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize(("rate", "burst"), [("100mbit", 8192), ("1gbit", 65536)])
def test_what_is_sent_at_once_is_what_passes_the_cable_at_once(rate: str, burst: int) -> None:
    command = [TWO_HOSTS, "--rate", rate, "ip", "-details", "link", "show", "cable"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    at_once = int(shown[shown.index("gso_max_size") + 1])
    packet, ethernet_ip_and_tcp = 1500, 66
    assert burst / 2 < at_once < burst - at_once / packet * ethernet_ip_and_tcp


@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_needs_an_ip_that_limits_what_is_sent_at_once(tmp_path: Path) -> None:
    ip = tmp_path / "ip"
    ip.write_text(f'#!/bin/sh\ncase "$*" in *gso_max_size*) exit 255 ;; esac\nexec {shutil.which("ip")} "$@"\n')
    ip.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run([TWO_HOSTS, "true"], env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "two_hosts: cannot limit what is sent at once" in result.stderr


def test_two_hosts_needs_root() -> None:
    command = ["bash", "-s", "true"]  # from stdin: that user may not be allowed to look into this folder
    nobody = 65534 if os.geteuid() == 0 else None
    with TWO_HOSTS.open() as script:
        result = subprocess.run(
            command, stdin=script, user=nobody, cwd="/", capture_output=True, text=True, check=False
        )
    assert result.returncode == 2
    assert "two_hosts: needs root" in result.stderr

"""A rank on the other of two hosts is killed, and a new one takes its place there.

The hosts are network namespaces of this machine, made by `benchmarks/two_hosts`, which needs root.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, environ, survives_deaths
from toy_recovery import builder, digest, train

from distributed import LocalWorld
from distributed.comm.mpi.family import by_hosts

TWO_HOSTS = ROOT / "benchmarks" / "two_hosts"
PROGRAM = """
import json, os, signal
from toy_recovery import builder, digest, train
from distributed import world

comm = world(survive=True, deterministic=True, timeout_seconds=30)
dies = {} if "MINIGRAD_LOST_AT" in os.environ else {1: (2, "hook")}
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
parameters, _, recoveries = train(comm, builder(), dies=dies, die=die)
print(json.dumps([comm.rank, os.uname().nodename, *digest(parameters), [r.source for r in recoveries]]), flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not survives_deaths(), reason="needs Open MPI with ULFM")
@pytest.mark.parametrize(
    ("num_ranks", "says", "source"),
    [
        (4, "", "a living rank"),
        (2, "the job was lost after 2 steps (no rank is left on host2): all ranks start again", "the job before"),
    ],
)
def test_a_rank_on_the_other_host_is_replaced_there(num_ranks: int, says: str, source: str, tmp_path: Path) -> None:
    trial = subprocess.run([TWO_HOSTS, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"no two hosts to be had here: {trial.stderr.strip()}")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [TWO_HOSTS, sys.executable, "-m", "distributed.recovery", "-n", str(num_ranks), script]
    in_turn = environ() | {"PRTE_MCA_rmaps_default_mapping_policy": "node:oversubscribe"}
    result = subprocess.run(command, env=in_turn, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert says in result.stderr
    assert ("start again" in result.stderr) == bool(says)
    rows = sorted(json.loads(line) for line in result.stdout.replace("\0", "").splitlines() if line.startswith("["))
    assert [row[:2] for row in rows] == [[rank, f"host{rank % 2 + 1}"] for rank in range(num_ranks)]
    expected = {digest(each[0]) for each in LocalWorld(num_ranks).run(train, builder())}
    assert {tuple(row[2:4]) for row in rows} == expected
    assert {name for row in rows for name in row[4]} == {source}


def test_ranks_come_back_on_their_hosts() -> None:
    assert by_hosts(["a", "b", "a", "b"], [1, 2, 3]) == {"b": [1, 3], "a": [2]}
    assert by_hosts(["a", "a"], [1]) == {"": [1]}

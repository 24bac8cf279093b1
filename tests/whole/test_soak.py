"""What shows only after thousands of steps."""

import json
import re
import sys
import textwrap
from pathlib import Path

import jobs
import pytest

SOURCE = """
    import json
    import resource
    from pathlib import Path

    import numpy as np

    from distributed import BucketedTrainer, TrainingConfig, world
    from minigrad import cross_entropy
    from minigrad.models import GPT, GPTConfig

    comm = world()
    model = GPT(GPTConfig(vocab_size=16, context=8, num_layers=1, num_heads=2, width=16))
    trainer = BucketedTrainer(model, comm, TrainingConfig(max_grad_norm=1.0), bucket_bytes=4096)
    assert trainer.num_buckets > 2
    generator = np.random.default_rng(comm.rank)
    resident = []
    for step in range(11_001):
        if step % 1000 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * resource.getpagesize())
        rows = generator.integers(0, 16, (2 + step % 3, 9))
        loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        trainer.backward_and_step(loss, num_samples=len(rows))
    by_rank = comm.gather_objects(resident)
    if comm.rank == 0:
        print(json.dumps(by_rank))
"""


@pytest.mark.soak
@jobs.needs_mpirun
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_stays_flat_over_10_000_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LIMIT_SECONDS", 900)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SOURCE))
    result = jobs.run_job(["-m", "mpi4py", str(script)], ranks=2)
    assert result.returncode == 0, result.stderr
    for resident in json.loads(result.stdout.splitlines()[-1]):
        start, *later = resident[1:]  # the first thousand steps fill caches
        assert len(later) == 10
        assert max(later) < 1.01 * start, resident


@pytest.mark.soak
@jobs.needs_mpirun
def test_the_default_run_learns_more_than_counting_can(tmp_path: Path) -> None:
    """What `make train` does, on two ranks: below 1.6 nats a byte, and below a strong trigram table."""
    script = str(jobs.ROOT / "examples" / "train_gpt.py")
    result = jobs.run_job(["-m", "mpi4py", script, "--dp", "2"], ranks=2, cwd=tmp_path, limit_seconds=900)
    assert result.returncode == 0, result.stderr
    (loss,) = re.findall(r"validation loss (\d\.\d+) nats a token", result.stdout)
    (table,) = re.findall(r"a trigram table gets (\d\.\d+)", result.stdout)
    assert float(loss) < min(1.6, float(table))

"""Jobs of several ranks that take turns: `benchmarks/interleave.py` and `benchmarks/rank_jobs.py`."""

from __future__ import annotations

from pathlib import Path
from threading import Lock, Thread

import pytest
from interleave import Turnstile, take_turns
from rank_jobs import HERE, Job, in_turns


def test_jobs_run_one_at_a_time_and_each_has_all_its_turns(tmp_path: Path) -> None:
    turns, running, log = tmp_path / "turns", Lock(), []
    Turnstile.write(turns, ["a", "b"])

    def job(name: str, num_turns: int) -> None:
        def step() -> None:
            assert running.acquire(blocking=False)
            log.append(name)
            running.release()

        own = Turnstile(turns, name)
        take_turns({"one": step}, num_turns, barrier=int, gather=lambda x: [x], steps_a_turn=1, turnstile=own)

    threads = [Thread(target=job, args=("a", 1)), Thread(target=job, args=("b", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert "".join(log) == "aabbab" + "bb"  # two steps each to warm up; then b has two turns more than a


def test_a_job_that_fails_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    fails, waits = tmp_path / "fails.py", tmp_path / "waits.py"
    fails.write_text("raise SystemExit('it is broken')")
    waits.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(HERE)!r})\nfrom interleave import Turnstile\n"
        "Turnstile(Path(sys.argv[2]), sys.argv[3]).wait()"
    )
    with pytest.raises(RuntimeError, match="it is broken"):
        in_turns(Job((), str(fails), ()), Job((), str(waits), ()))

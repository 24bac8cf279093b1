"""The verdict of `make bench-buckets`: the size that is chosen against the best of all."""

import bucket_sweep
import pytest
from bucket_sweep import LINKS, measure, table

FOUND = {
    "seconds": {"524288": [0.08, 0.10, 0.12], "1048576": [0.09, 0.102, 0.2], "2097152": [0.1, 0.103, 0.2]},
    "num_buckets": {"524288": 10, "1048576": 6, "2097152": 4},
    "words": "buckets of 1,000 KiB",
}


@pytest.mark.parametrize(("chosen", "verdict"), [("1048576", "+2.0%, at most 2%: met"), ("2097152", "+3.0%")])
def test_the_chosen_size_may_take_2_percent_longer_than_the_best(chosen, verdict):
    lines = list(table(FOUND | {"chosen": chosen}))
    assert lines[0].endswith("best")
    assert lines[0].split()[:5] == ["10", "buckets", "of", "512", "KiB"]
    assert [line.endswith("chosen") for line in lines[:3]] == [size == chosen for size in FOUND["seconds"]]
    assert verdict in lines[-1]
    assert lines[-1].endswith("met" if chosen == "1048576" else "missed")


def test_it_goes_on_link_by_link(monkeypatch, tmp_path):
    monkeypatch.setattr(bucket_sweep, "UNFINISHED", tmp_path / "unfinished.json")
    calls = []
    monkeypatch.setattr(bucket_sweep, "run_job", lambda launcher, job, *rest: calls.append(rest[0]) or FOUND)
    while len(measure(["mpirun"], seconds=0)) < len(LINKS):
        pass
    assert calls == [hook for _, hook in LINKS.values()]

"""Who saves what: every tensor once, by a rank that holds it, the bytes spread evenly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.checkpoint.plan import Held, Slice, Stored, divide


def held(**num_bytes: int) -> dict[str, Held]:
    return {name: Held((size,), "uint8", size) for name, size in num_bytes.items()}


def test_replicas_share_the_work():
    plan = divide([held(a=5, b=3, c=2, d=2)] * 2)
    assert {name: stored.rank for name, stored in plan.items()} == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_what_one_rank_holds_that_rank_saves():
    plan = divide([held(a=4, tied=1), held(b=1, tied=1)])
    assert plan == {"a": Stored(0, (4,), "uint8"), "b": Stored(1, (1,), "uint8"), "tied": Stored(1, (1,), "uint8")}


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.just(None), min_size=1), min_size=1, max_size=5))
def test_each_tensor_is_saved_once_by_a_rank_that_holds_it(names_by_rank):
    by_rank = [{name: Held((3,), "float32", 12) for name in names} for names in names_by_rank]
    plan = divide(by_rank)
    assert plan.keys() == set().union(*names_by_rank)
    assert all(name in names_by_rank[stored.rank] for name, stored in plan.items())


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_no_replica_saves_more_than_its_share_and_one_tensor(sizes, num_ranks):
    plan = divide([held(**{f"t{i}": size for i, size in enumerate(sizes)})] * num_ranks)
    loads = [sum(stored.shape[0] for stored in plan.values() if stored.rank == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / num_ranks + max(sizes)


def test_one_name_for_two_tensors_is_refused():
    parts = [{"w": Held((2, 3), "float32", 24)}, {}, {"w": Held((3, 2), "float32", 24)}]
    with pytest.raises(ValueError, match=r"w is float32\[2, 3\] on rank 0 and float32\[3, 2\] on rank 2"):
        divide(parts)
    parts[2] = {"w": Held((2, 3), "float64", 48)}
    with pytest.raises(ValueError, match=r"w is float32\[2, 3\] on rank 0 and float64\[2, 3\] on rank 2"):
        divide(parts)


def sliced(start, stop):
    return {"w": Held((6,), "uint8", stop - start, start, stop)}


def test_slices_are_saved_by_ranks_that_hold_them():
    plan = divide([sliced(0, 4), sliced(4, 6), sliced(0, 4), sliced(4, 6)])  # of two replicas
    assert plan == {"w": Stored(0, (6,), "uint8", (Slice(0, 0, 4), Slice(1, 4, 6)))}


def test_slices_that_leave_a_gap_are_refused():
    with pytest.raises(
        ValueError, match=r"the slices of a tensor must be all of it, but of w, uint8\[6\], .* 0 to 3, 4 to 6"
    ):
        divide([sliced(0, 3), sliced(4, 6)])

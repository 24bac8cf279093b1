"""What only one rank finds wrong is raised by all of them, with the same words."""

import numpy as np
import pytest

from distributed.agreement import agree, first_failure, of_rank_0, same_on_all


def test_of_two_mistakes_the_first_rank_speaks(ranks):
    def program(comm):
        def prepare():
            raise TypeError(f"mistake of rank {comm.rank}")

        good = comm.rank == 0 < comm.size - 1
        with pytest.raises(ValueError, match=rf"\[rank {min(1, comm.size - 1)}\] mistake of") as caught:
            agree(comm, (lambda: np.zeros(2, np.int64)) if good else prepare, num_columns=2)
        assert isinstance(caught.value.__cause__, TypeError) is not good
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1


def test_agree_gives_the_rows_of_all_ranks(ranks):
    def program(comm):
        return agree(comm, lambda: np.array([comm.rank, 7]), num_columns=2).tolist()

    assert ranks.run(program) == [[[rank, 7] for rank in range(ranks.size)]] * ranks.size


def test_the_first_failure_speaks_on_every_rank(ranks):
    def program(comm):
        assert first_failure(comm, None) is None
        last = f"disk {comm.rank} is full" if comm.rank == comm.size - 1 else None
        assert first_failure(comm, last) == f"[rank {comm.size - 1}] disk {comm.size - 1} is full"
        assert first_failure(comm, f"disk {comm.rank} is full") == "[rank 0] disk 0 is full"

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_what_must_be_the_same_names_the_first_difference(ranks):
    def program(comm):
        same_on_all(comm, "layer", ["a", "b"])
        for own, found in [
            (["a", "c"], "layer 1 is b on rank 0 and c on rank 1"),
            (["a"], "layer 1 is b on rank 0 and missing on rank 1"),
            (["a", "b", "c"], "layer 2 is missing on rank 0 and c on rank 1"),
        ]:
            with pytest.raises(ValueError, match="need the same layers in the same order, but " + found):
                same_on_all(comm, "layer", own if comm.rank == 1 else ["a", "b"])

    ranks.run(program)


def test_what_rank_0_cannot_make_fails_on_every_rank(ranks):
    def program(comm):
        def fails():
            assert comm.rank == 0, "only rank 0 makes it"
            raise PermissionError("not for you")

        assert of_rank_0(comm, lambda: {"made by": comm.rank}) == {"made by": 0}
        with pytest.raises(LookupError) as caught:
            of_rank_0(comm, fails, failing=LookupError)
        assert isinstance(caught.value.__cause__, PermissionError) is (comm.rank == 0)
        assert of_rank_0(comm, lambda: None) is None  # the ranks still meet
        return str(caught.value)

    assert ranks.run(program) == ["[rank 0] PermissionError: not for you"] * ranks.size

"""Coordinates of ranks in a dp x pp grid."""

import numpy as np
import pytest

from distributed import Mesh, SoloCommunicator


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("dp", "pp"), [(1, 4), (2, 2), (4, 1)])
def test_axes_hold_the_ranks_of_a_row_and_of_a_column(ranks, dp, pp):
    def program(comm):
        mesh = Mesh(comm, dp=dp, pp=pp)
        row, column = divmod(comm.rank, pp)
        assert (mesh.dp.size, mesh.dp.rank) == (dp, row)
        assert (mesh.pp.size, mesh.pp.rank) == (pp, column)
        assert mesh.pp.gather_objects(comm.rank) == [row * pp + i for i in range(pp)]
        assert mesh.dp.gather_objects(comm.rank) == [i * pp + column for i in range(dp)]

    ranks.run(program)


@pytest.mark.ranks(4)
def test_both_axes_reduce_at_once(ranks):
    def program(comm):
        mesh = Mesh(comm, dp=2, pp=2)
        along_pp, along_dp = np.array([comm.rank]), np.array([comm.rank])
        works = [mesh.pp.allreduce(along_pp), mesh.dp.allreduce(along_dp)]
        for work in reversed(works):
            work.wait()
        row, column = divmod(comm.rank, 2)
        assert along_pp == 4 * row + 1
        assert along_dp == 2 * column + 2

    ranks.run(program)


def test_default_is_one_rank():
    mesh = Mesh(SoloCommunicator())
    assert (mesh.dp.size, mesh.pp.size) == (1, 1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("dp", "pp"), [(2, 2), (1, 1), (-1, -3), (3, 0)])
def test_grid_must_hold_every_rank(ranks, dp, pp):
    def program(comm):
        rule = f"dp \\* pp must equal the number of ranks, got dp={dp}, pp={pp} and 3 ranks"
        with pytest.raises(ValueError, match=rule):
            Mesh(comm, dp=dp, pp=pp)

    ranks.run(program)

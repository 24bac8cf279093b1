"""The proof over all replicas: messages, buckets where they are launched, and what ends a step."""

from dataclasses import dataclass, replace

import pytest
from toy_pipeline import PLACEMENTS, X, Y, chunked, connect, four_layers, scale

import minigrad as mg
from distributed import DistributedDataParallel, Mesh
from minigrad.parameter import Parameter
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage, ScheduleError
from pipeline.runtime.replicas import replicas_of
from pipeline.schedules.schedule import v_shape
from pipeline.schedules.whole_step import Replica, check_whole_step

ZBV = Replica.by_stage(SCHEDULES["zbv"].orders(2, 4))  # stages 0 and 3 on rank 0, 1 and 2 on rank 1


def check(*replicas, rank_of=v_shape, num_stages=4):
    check_whole_step(replicas, rank_of=rank_of, num_stages=num_stages)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_proved_beside_replicas_of_it(name):
    schedule = SCHEDULES[name]
    replica = Replica.by_stage(schedule.orders(4, 8))
    check(*[replace(replica, tied=[(0, 2), (1, 3)])] * 3, rank_of=schedule.rank_of, num_stages=schedule.num_stages(4))


def test_a_bucket_is_launched_behind_the_last_backward_of_its_stages_and_none_before_the_one_in_front():
    one = Replica.by_stage(SCHEDULES["1f1b"].orders(2, 2))
    other = replace(one, buckets=[[(0,)], [(1,), (1,)]])
    place = {"rank_of": SCHEDULES["1f1b"].rank_of, "num_stages": 2}
    with pytest.raises(ScheduleError) as caught:
        check(one, other, **place)
    assert str(caught.value) == (
        "deadlock: rank 3 in bucket 1 of stage 1 waits for bucket 1 of stage 1, which rank 1 never does\n"
        "rank 3  ... 1BW1  bucket 0 of stage 1  [bucket 1 of stage 1]  1SEND_B1  tell losses"
    )


def test_replicas_that_launch_their_buckets_in_two_orders_wait_for_each_other():
    first_last = replace(ZBV, buckets=[[(0,), (3,)], ZBV.buckets[1]])
    check(first_last, first_last)
    with pytest.raises(
        ScheduleError, match=r"^deadlock: rank 0 in bucket 0 of stage 3 waits for bucket 0 of stage 3, w"
    ):
        check(ZBV, first_last)


def test_a_bucket_that_is_final_early_waits_for_the_one_in_front():
    one = replace(ZBV, buckets=[[(0,), (3,)], ZBV.buckets[1]])
    with pytest.raises(ScheduleError) as caught:
        check(one, replace(one, buckets=[[(0,)], ZBV.buckets[1]]))
    assert "rank 0  ... 0W3  bucket 0 of stage 0  [bucket 1 of stage 3]  tell losses" in str(caught.value)


def test_a_bucket_with_tied_gradients_comes_after_their_sum_and_so_do_those_behind_it():
    tied = replace(ZBV, buckets=[[(), (3,)], [(2,), (1,)]], tied=[(0, 1)])
    check(tied, tied)
    with pytest.raises(ScheduleError) as caught:
        check(tied, replace(tied, buckets=[[(), ()], [(2,), (1,)]]))
    assert "rank 0  ... sum tied  bucket 0 of tied gradients  [bucket 1 of stage 3]  tell losses" in str(caught.value)


def test_replicas_may_run_other_schedules():
    """What the order of a pipeline is concerns nobody else, as long as its buckets are launched in one order."""
    check(ZBV, Replica.by_stage(SCHEDULES["dualpipev"].orders(2, 6)))


@dataclass
class Reduces:
    """Buckets that are given."""

    comm: object
    bucket_params: list[list[Parameter]]


@pytest.mark.ranks(4)
def test_the_executor_proves_its_messages_with_the_buckets_of_ddp(ranks):
    def program(comm):
        mesh = Mesh(comm, dp=2, pp=2)
        schedule = chunked(*PLACEMENTS["v"])
        layers = [scale("a", shared="tied"), *four_layers()[1:3], scale("b", shared="tied")]
        layers[1:3] = [scale("c"), scale("d")]
        stages = PipelineStage.of(layers, mesh.pp, schedule)
        ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=4)
        pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=3, loss_fn=mg.mse)
        pipe.check_deadlock_free(ddp)
        orders = schedule.orders(2, 3)
        return [replica.buckets for replica in replicas_of(stages, mesh.pp, ddp, orders)], ddp.buckets.num_buckets

    for buckets, num_buckets in ranks.run(program):
        # Stages 0 and 3 hold one parameter, both on rank 0: it is final with the last backward of both.
        assert buckets == [[[(0, 3)], [(2,), (1,)]]] * 2
        assert num_buckets in (1, 2)


@pytest.mark.ranks(4)
def test_every_rank_raises_where_replicas_differ(ranks):
    def program(comm):
        mesh = Mesh(comm, dp=2, pp=2)
        pipe = connect(mesh.pp, [scale(name) for name in "abcd"], schedule="zbv", num_microbatches=4)
        buckets = [[p] for p in pipe.stages.parameters()][:: 1 if mesh.dp.rank else -1]
        with pytest.raises(ScheduleError) as caught:
            pipe.check_deadlock_free(Reduces(mesh.dp, buckets))
        stranger = Reduces(mesh.dp, [[Parameter(X, "stranger")]] if comm.rank == 1 else [])
        if mesh.dp.rank == 0:
            with pytest.raises(ValueError, match="a bucket of gradients has 'stranger', which is on no stage of"):
                pipe.check_deadlock_free(stranger)
        return str(caught.value)

    messages = ranks.run(program)
    assert messages[0].startswith("deadlock: rank 0 in bucket 0 of stage 3 waits for bucket 0 of stage 3, which rank 2")
    assert set(messages) == {messages[0]}


@pytest.mark.ranks(2)
def test_a_pipeline_without_replicas_is_proved_with_its_tied_sums(ranks):
    def program(comm):
        pipe = connect(comm, [scale("a", shared="tied"), scale("b", shared="tied")], num_microbatches=2)
        pipe.check_deadlock_free(DistributedDataParallel(pipe.stages, comm.split(color=comm.rank)))
        return pipe.stages.tied_groups, pipe.step(X, X)

    assert all(groups == ((0, 1),) for groups, _ in ranks.run(program))
    assert Y.shape

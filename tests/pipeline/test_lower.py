import inspect
from collections import Counter
from itertools import product

import pytest
from cases import case
from drawn_orders import read

from pipeline import SCHEDULES, Action, B, F, Kind, W, lower
from pipeline.schedules.schedule import round_robin, v_shape

V_ORDERS = "0F0 0F1 3F0 3B0 3F1 3B1 3W0 0B0 0W0 3W1 0B1 0W1\n1F0 2F0 1F1 2F1 2BW0 1BW0 2BW1 1BW1"

SIZES = [(1, 1), (1, 6), (2, 1), (2, 2), (2, 7), (3, 2), (3, 6), (6, 1), (6, 6), (6, 7)]  # ranks, micro-batches
CASES = [
    *(
        (schedule.orders(p, m), schedule.rank_of, schedule.num_stages(p))
        for schedule, (p, m) in product(SCHEDULES.values(), SIZES)
        if schedule.name != "interleaved_1f1b" or m % p == 0
    ),
    (read(V_ORDERS), v_shape, 4),
]


def test_two_ranks_look_like_the_docstring():
    drawing = """
    rank 0   0F0 0SEND_F0  0RECV_B0  0F1 0SEND_F1  0RECV_B1  0BW0  0BW1
    rank 1   1RECV_F0  1F0  1RECV_F1  1BW0 1SEND_B0  1F1  1BW1 1SEND_B1
"""
    programs = lower(SCHEDULES["1f1b"].orders(2, 2), rank_of=round_robin, num_stages=2)
    assert programs == read(drawing.replace("rank 0", "").replace("rank 1", ""))
    assert drawing.rstrip() in inspect.getdoc(lower)


def test_lookahead_moves_receives_and_nothing_else():
    orders = SCHEDULES["gpipe"].orders(2, 3)

    def second_rank(lookahead):
        return lower(orders, rank_of=round_robin, num_stages=2, lookahead=lookahead)[1]

    backwards = " 1BW0 1SEND_B0 1BW1 1SEND_B1 1BW2 1SEND_B2"
    assert second_rank(0) == read("1RECV_F0 1F0  1RECV_F1 1F1  1RECV_F2 1F2" + backwards)[0]
    assert second_rank(1) == read("1RECV_F0 1RECV_F1 1F0  1RECV_F2 1F1  1F2" + backwards)[0]
    assert second_rank(9) == read("1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2" + backwards)[0]


def test_neighbours_on_one_rank_hand_over_without_messages():
    # Stages 0 and 3 live on rank 0, 1 and 2 on rank 1: nothing is sent between 1 and 2.
    drawing = """
0F0 0SEND_F0  3RECV_F0 3F0 3BW0 3SEND_B0  0RECV_B0 0BW0
1RECV_F0 1F0 2F0 2SEND_F0  2RECV_B0 2BW0 1BW0 1SEND_B0
"""
    orders = read("0F0 3F0 3BW0 0BW0\n1F0 2F0 2BW0 1BW0")
    assert lower(orders, rank_of=v_shape, num_stages=4, lookahead=0) == read(drawing)


def test_the_weight_half_neither_sends_nor_receives():
    orders = [[F(0, 0), B(0, 0), W(0, 0)], [F(1, 0), B(1, 0), W(1, 0)]]
    programs = lower(orders, rank_of=round_robin, num_stages=2, lookahead=0)
    assert programs == read("0F0 0SEND_F0 0RECV_B0 0B0 0W0\n1RECV_F0 1F0 1B0 1SEND_B0 1W0")


def each_order_and_lookahead(check):
    @pytest.mark.parametrize("lookahead", [0, 1, 2, 100])
    def on_all_orders(lookahead):
        for orders, rank_of, num_stages in CASES:
            programs = lower(orders, rank_of=rank_of, num_stages=num_stages, lookahead=lookahead)
            with case(*orders):
                check(orders, rank_of, num_stages, lookahead, programs)

    return on_all_orders


@each_order_and_lookahead
def test_every_message_has_two_ends(orders, rank_of, num_stages, lookahead, programs):
    owner = {stage: rank_of(stage, len(orders)) for stage in range(num_stages)}
    sends, receives = Counter(), Counter()  # by what is sent, sender and receiver (stage and rank), micro-batch
    for rank, program in enumerate(programs):
        for action in program:
            here = (action.stage, rank)
            after = (action.stage + 1, owner.get(action.stage + 1))
            before = (action.stage - 1, owner.get(action.stage - 1))
            match action.kind:
                case Kind.SEND_F:
                    sends["F", here, after, action.microbatch] += 1
                case Kind.RECV_F:
                    receives["F", before, here, action.microbatch] += 1
                case Kind.SEND_B:
                    sends["B", here, before, action.microbatch] += 1
                case Kind.RECV_B:
                    receives["B", after, here, action.microbatch] += 1
    assert sends == receives
    assert set(sends.values()) <= {1}
    assert all(sender[1] != receiver[1] for _, sender, receiver, _ in sends)


@each_order_and_lookahead
def test_inputs_are_posted_before_and_outputs_leave_at_once(orders, rank_of, num_stages, lookahead, programs):
    assert [[action for action in program if action.kind.is_compute] for program in programs] == orders
    for rank, program in enumerate(programs):
        posted, before = [], None
        for action in program:
            if action.kind.receives:
                posted.append(action)
                continue
            if action.kind.sends:
                assert action.carries in before.parts
                continue
            before = action
            waiting = [F(r.stage, r.microbatch) if r.kind is Kind.RECV_F else B(r.stage, r.microbatch) for r in posted]
            pairs = sum(single in a.parts for a in orders[rank] if a.kind is Kind.PAIR for single in waiting)
            assert len(posted) <= lookahead + 1 + pairs  # a pair has two
            for single in action.singles:
                kind, source = Kind.RECV_F, single.stage - 1
                if single.kind is not Kind.F:
                    kind, source = Kind.RECV_B, single.stage + 1
                if single.kind is not Kind.W and 0 <= source < num_stages and rank_of(source, len(orders)) != rank:
                    posted.remove(Action(kind, single.stage, single.microbatch))
        assert not posted


def test_lookahead_is_not_negative():
    with pytest.raises(ValueError, match="lookahead must be at least 0, got -1"):
        lower([[F(0, 0)]], rank_of=round_robin, num_stages=1, lookahead=-1)


def test_a_program_is_not_lowered_again():
    programs = lower(SCHEDULES["gpipe"].orders(2, 1), rank_of=round_robin, num_stages=2)
    with pytest.raises(ValueError, match=r"an order holds compute actions only .*got 0RECV_B0"):
        lower(programs, rank_of=round_robin, num_stages=2)

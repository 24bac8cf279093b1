import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedules.action import BW, Action, B, F, Kind, W

SINGLE = [kind for kind in Kind if kind is not Kind.PAIR]
ACTIONS = st.tuples(st.sampled_from(SINGLE), st.integers(0, 999), st.integers(0, 999)).map(lambda parts: Action(*parts))


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (F(2, 0), "2F0"),
        (B(0, 1), "0B1"),
        (W(0, 1), "0W1"),
        (BW(0, 3), "0BW3"),
        (Action(Kind.SEND_F, 1, 2), "1SEND_F2"),
        (Action(Kind.RECV_B, 10, 12), "10RECV_B12"),
    ],
)
def test_prints_as_stage_kind_microbatch(action, text):
    assert str(action) == text


@settings(deadline=None)  # a busy machine is no failure
@given(ACTIONS)
def test_parse_reads_back_what_is_printed(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", " 2F0", "-1F0", "2F0 ", "2F0\n", "2F-1", "2_0", "2F0@3", "2SEND_F0@", "٢F0"]
)
def test_parse_refuses_anything_else(text):
    with pytest.raises(
        ValueError, match=r"reads stage, kind, micro-batch, as 2F0, with a kind of F B W BW SEND_F .*got"
    ):
        Action.parse(text)


def test_actions_are_values():
    assert {F(1, 2), F(1, 2), BW(1, 2)} == {F(1, 2), BW(1, 2)}


def test_compute_and_communication():
    assert [kind.name for kind in Kind if kind.is_compute] == ["F", "B", "W", "BW", "PAIR"]


def test_a_full_backward_is_both_halves():
    assert BW(1, 2).parts == (B(1, 2), W(1, 2))
    assert F(1, 2).parts == (F(1, 2),)


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        (F(0, 5), []),
        (F(1, 5), [F(0, 5)]),
        (B(1, 5), [F(1, 5), B(2, 5)]),
        (BW(1, 5), [F(1, 5), B(2, 5)]),
        (BW(2, 5), [F(2, 5)]),
        (W(2, 5), [B(2, 5)]),
    ],
)
def test_needs_in_three_stages(action, needs):
    assert action.needs(num_stages=3) == needs


SEND_F, RECV_F, SEND_B, RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B


@pytest.mark.parametrize(
    ("send", "receive", "carried"),
    [
        (Action(SEND_F, 1, 5), Action(RECV_F, 2, 5), F(1, 5)),
        (Action(SEND_B, 1, 5), Action(RECV_B, 0, 5), B(1, 5)),
    ],
)
def test_the_two_ends_of_a_message_and_what_it_carries(send, receive, carried):
    assert (send.partner, receive.partner) == (receive, send)
    assert send.carries == receive.carries == carried
    assert (send.kind.sends, send.kind.receives, receive.kind.sends, receive.kind.receives) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("action", "arrivals", "departures"),
    [
        (F(0, 5), (), (Action(SEND_F, 0, 5),)),
        (F(1, 5), (Action(RECV_F, 1, 5),), (Action(SEND_F, 1, 5),)),
        (F(2, 5), (Action(RECV_F, 2, 5),), ()),
        (BW(0, 5), (Action(RECV_B, 0, 5),), ()),
        (B(1, 5), (Action(RECV_B, 1, 5),), (Action(SEND_B, 1, 5),)),
        (BW(2, 5), (), (Action(SEND_B, 2, 5),)),
        (W(1, 5), (), ()),
    ],
)
def test_what_comes_and_goes_in_three_stages(action, arrivals, departures):
    assert action.arrivals(3) == arrivals
    assert action.departures(3) == departures


def test_a_gradient_confirms_the_send_of_its_output():
    assert Action(RECV_B, 1, 5).confirms == Action(SEND_F, 1, 5)
    assert Action(RECV_F, 1, 5).confirms is None


def test_what_computes_has_no_other_end():
    for ask in (lambda: F(1, 2).partner, lambda: F(1, 2).carries):
        with pytest.raises(ValueError, match="only messages have two ends, got 1F2"):
            ask()


def test_communication_has_no_needs():
    with pytest.raises(ValueError, match=r"compute actions only .*got 1SEND_F2"):
        Action(Kind.SEND_F, 1, 2).needs(num_stages=3)

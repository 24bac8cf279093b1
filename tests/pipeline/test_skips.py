"""Skip connections over stages as data: their messages, their proof, their time."""

import re

import pytest

from pipeline import BW, SCHEDULES, Action, F, W, check_deadlock_free, lower, simulate
from pipeline.cli.main import main
from pipeline.schedules.action import check_skips
from pipeline.schedules.held import Measured, StageBytes
from pipeline.schedules.schedule import round_robin
from pipeline.schedules.whole_step import Replica, check_whole_step

SKIPS = ((0, 3), (1, 2), (0, 2))


def names(actions):
    return [str(action) for action in actions]


def test_what_comes_and_goes_by_a_skip():
    assert names(F(0, 7).departures(4, SKIPS)) == ["0SEND_F7", "0SEND_F7@2", "0SEND_F7@3"]
    assert names(F(2, 7).arrivals(4, SKIPS)) == ["2RECV_F7", "2RECV_F7@0", "2RECV_F7@1"]
    assert names(BW(0, 7).arrivals(4, SKIPS)) == ["0RECV_B7", "0RECV_B7@2", "0RECV_B7@3"]
    assert names(BW(3, 7).departures(4, SKIPS)) == ["3SEND_B7", "3SEND_B7@0"]
    assert W(0, 7).arrivals(4, SKIPS) == W(0, 7).departures(4, SKIPS) == ()
    assert F(3, 7).needs(4, SKIPS) == [F(2, 7), F(0, 7)]


def test_both_ends_of_its_messages():
    send = Action.parse("0SEND_F7@3")
    assert str(send) == "0SEND_F7@3"
    assert (str(send.partner), send.partner.partner, send.carries) == ("3RECV_F7@0", send, F(0, 7))
    back = Action.parse("0RECV_B7@3")
    assert (str(back.partner), back.confirms, str(back.carries)) == ("3SEND_B7@0", send, "3B7")
    for text in ("0F7@3", "0SEND_F7@", "0BW7@1"):
        with pytest.raises(ValueError, match="reads stage, kind, micro-batch"):
            Action.parse(text)


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        ([(2, 1)], "goes from a stage to a later one, of 4 stages, got 2-1"),
        ([(1, 1)], "goes from a stage to a later one, of 4 stages, got 1-1"),
        ([(0, 4)], "goes from a stage to a later one, of 4 stages, got 0-4"),
        ([(0, 2), (1, 3), (0, 2)], "a skip connection is given once, got 0-2 twice"),
    ],
)
def test_what_is_none_is_refused(skips, message):
    schedule = SCHEDULES["1f1b"]
    for ask in (
        lambda: check_skips(skips, 4),
        lambda: lower(schedule.orders(4, 2), rank_of=schedule.rank_of, num_stages=4, skips=skips),
        lambda: simulate(schedule.orders(4, 2), num_stages=4, skips=skips),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_ends_with_them_and_each_is_sent_once(schedule):
    place = {"rank_of": schedule.rank_of, "num_stages": schedule.num_stages(4), "skips": SKIPS}
    orders = schedule.orders(4, 8)
    programs = lower(orders, **place)
    check_deadlock_free(programs, **place)
    sent = [action for program in programs for action in program if action.kind.sends and action.other is not None]
    across = [skip for skip in SKIPS if len({schedule.rank_of(stage, 4) for stage in skip}) == 2]
    assert len(sent) == len(set(sent)) == 2 * 8 * len(across)
    check_whole_step([Replica.by_stage(orders)] * 2, **place)


def test_a_skip_that_nobody_receives_is_seen():
    schedule = SCHEDULES["gpipe"]
    place = {"rank_of": schedule.rank_of, "num_stages": 3}
    programs = lower(schedule.orders(3, 1), skips=[(0, 2)], **place)
    programs[2].remove(Action.parse("2RECV_F0@0"))
    with pytest.raises(ValueError, match=r"deadlock: rank 2 in 2F0 waits for 2RECV_F0@0, which rank 2 never does"):
        check_deadlock_free(programs, skips=[(0, 2)], **place)


def test_its_messages_take_their_time():
    orders = SCHEDULES["gpipe"].orders(3, 1)
    plain = simulate(orders, num_stages=3, latency=0.5)
    assert simulate(orders, num_stages=3, latency=0.5, skips=[(0, 2)]) == plain  # there long before
    late = simulate(orders, num_stages=3, latency=0.5, skips=[(0, 2)], skip_bytes=10, bandwidth=2)
    assert late.rows[2][0].start == 1 + 0.5 + 5
    assert late.rows[0][1].start == late.rows[2][1].end + 0.5 + 5
    two = simulate(orders, num_stages=3, skips=[(0, 2), (1, 2)], skip_bytes=[1, 8], bandwidth=1)
    assert two.rows[2][0].start == 2 + 8
    with pytest.raises(ValueError, match="skip_bytes must be one number or one for each of the skips, got 2 for 1"):
        simulate(orders, num_stages=3, skips=[(0, 2)], skip_bytes=[1, 2])


def test_what_waits_takes_memory_where_it_was_made():
    """On rank 0 "a" of two micro-batches waits until rank 2 takes the first; on rank 2 its gradients wait likewise."""
    timeline = simulate(SCHEDULES["gpipe"].orders(3, 2), num_stages=3)
    assert timeline.peak_memory(1, 0) == [2, 2, 2]
    assert timeline.peak_memory(0, 0, skips=[(0, 2)]) == [2, 0, 2]
    # Rank 0: two values wait at time 2, with two tapes. Rank 2: its last gradient is there before its tape goes.
    assert timeline.peak_memory(1, 0, skips=[(0, 2)], skip_memory=10) == [22, 2, 21]
    assert timeline.peak_memory(0, 0, skips=[(0, 2), (0, 1)], skip_memory=[10, 1]) == [22, 2, 20]
    # In a V both ends may be on one rank: what waits is held from the first action to the second.
    row = simulate(SCHEDULES["zbv"].orders(1, 1), num_stages=2).peak_memory(0, 0, skips=[(0, 1)])
    assert row == [1]
    forwards = simulate([[F(0, 0)], [F(1, 0)], [F(2, 0)]], num_stages=3)
    assert forwards.peak_memory(1, 0, skips=[(0, 2)]) == [1, 0, 0]
    with pytest.raises(ValueError, match="skip_memory must be one number or one for each of the skips, got 2 for 1"):
        timeline.peak_memory(0, 0, skips=[(0, 2)], skip_memory=[1, 2])


def test_bytes_of_what_waits_come_on_top_of_what_stages_hold():
    stage = StageBytes(100, 100, 200, 10, 4, 13, 3, 3, 3, 2)
    measured, timeline = (
        Measured(lambda count: [stage] * count),
        simulate(SCHEDULES["gpipe"].orders(3, 2), num_stages=3),
    )
    plain = measured.peaks(timeline, 3, round_robin)
    assert plain == [423, 423, 423]
    assert measured.peaks(timeline, 3, round_robin, skips=[(0, 2)], skip_bytes=100) == [623, 423, 513]


def test_the_commands_take_them(capsys):
    assert (
        main(["simulate", "gpipe", "--stages", "3", "--microbatches", "2", "--skips", "0-2", "--skip-bytes", "5"]) == 0
    )
    assert "skips that wait, at most a rank         2 0 2\n" in capsys.readouterr().out
    assert main(["check", "zbv", "--stages", "4", "--skips", "0-3,1-2", "--dp", "2"]) == 0
    assert "no timing of messages and reductions can deadlock it" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["3-0", "0-3,0-3", "0", "0-3,", "a-b", "0-0", "-1-2"])
def test_what_is_no_skip_is_one_line(text, capsys):
    with pytest.raises(SystemExit):
        main(["check", "1f1b", f"--skips={text}"])
    assert "must be stages and later stages, as 0-3,1-2, each once" in capsys.readouterr().err


def test_compare_and_search_take_them_as_simulate_does(capsys):
    """On two ranks rank 0 keeps what waits for the last stage until its forward there; the search counts it too."""
    skips = ["--skips", "0-1", "--skip-bytes", "3"]
    sizes = ["--ranks", "2", "--microbatches", "4"]
    assert main(["compare", "gpipe", "1f1b", "zbv", *sizes, *skips, "--bandwidth", "1"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["gpipe"].endswith("16 11")  # rank 0: four micro-batches and four messages, all before one has arrived
    assert main(["compare", "1f1b", *sizes, "--skips", "0-2"]) == 2
    assert "a skip connection goes from a stage to a later one, of 2 stages, got 0-2" in capsys.readouterr().err
    search = ["search", *sizes, "--placement", "one", "--seconds", "2", *skips]
    assert main([*search, "--memory", "8"]) == 0
    [peaks] = re.findall(r"^memory a rank +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert max(map(float, peaks.split())) <= 8
    assert main([*search, "--memory", "3"]) == 2
    assert "a rank must hold one micro-batch on each of its stages, which takes 4" in capsys.readouterr().err
    for command in ("compare", "search"):
        assert main([command, "--skip-bytes", "3"]) == 2
        assert capsys.readouterr().err == "python -m pipeline: --skip-bytes needs --skips\n"

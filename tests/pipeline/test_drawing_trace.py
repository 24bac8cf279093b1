"""The picture of what ranks did: a row a rank, lanes for what is under way, words where there is room, one axis."""

from xml.etree import ElementTree

import pytest

from pipeline.schedules.drawing.svg import IDLE, svg
from pipeline.schedules.drawing.trace import COLOURS, LANE_HEIGHT, OTHER, RULE, UNDER_WAY, trace_picture
from pipeline.schedules.measured import is_of_schedule

EVENTS = [
    (0, "forward", 5.0, 5.2, "compute"),
    (0, "backward", 5.2, 5.7, "compute"),
    (0, "buckets", 5.7, 5.9, "wait"),
    (0, "256 KiB", 5.3, 5.8, "bucket"),
    (0, "1 MiB", 5.5, 5.9, "bucket 2"),
    (0, "optimizer", 5.9, 6.0, "compute"),
    (1, "forward", 5.0, 5.5, "compute"),
]
PIPELINE = [
    (0, "open", 0.0, 0.1, "step"),
    (0, "0F0", 0.1, 0.4, "compute"),
    (0, "0SEND_F0", 0.4, 0.42, "message"),
    (0, "0SEND_F0 96 KiB", 0.4, 0.5, "send"),
    (0, "1RECV_B0 96 KiB", 0.4, 0.8, "receive"),
    (0, "1RECV_B0", 0.42, 0.8, "wait"),
    (0, "0B0 0B1", 0.8, 0.9, "compute"),
    (0, "0W0", 0.9, 1.0, "compute"),
]
PREDICTED = [(0, "0F0", 0.0, 0.4, "compute"), (0, "0B0", 0.4, 1.9, "compute")]


def boxes_of(drawn, colour):
    """Boxes of a colour but for the legend's: left from the axis, width, top."""
    left = next(box.x for box in drawn.boxes if box.fill == IDLE)
    return [(round(b.x - left), round(b.width), b.y) for b in drawn.boxes if b.fill == colour and b.height != 12]


def test_lengths_are_times_and_each_rank_has_its_row():
    drawn = trace_picture(EVENTS, "step 3", width=1000.0)
    rows = [box for box in drawn.boxes if box.fill == IDLE]
    assert [row.width for row in rows] == [1000, 1000]
    top, below = rows[0].y, rows[1].y
    assert boxes_of(drawn, COLOURS["forward"]) == [(0, 199, top), (0, 499, below)]
    assert boxes_of(drawn, COLOURS["backward"]) == [(200, 499, top)]
    assert boxes_of(drawn, OTHER["wait"]) == [(700, 199, top)]
    assert boxes_of(drawn, COLOURS["optimizer"]) == [(900, 99, top)]
    lanes = boxes_of(drawn, UNDER_WAY["bucket"])
    assert [lane[:2] for lane in lanes] == [(300, 500), (500, 400)]
    assert top + rows[0].height < lanes[0][2] == lanes[1][2] - LANE_HEIGHT < below


def test_words_say_what_it_is_and_how_large_and_stay_in_the_picture():
    drawn = trace_picture(EVENTS, "step 3 <dp>", width=1000.0)
    texts = [words.text for words in drawn.words]
    assert texts[:2] == ["step 3 <dp>", "1000.0 ms, of these in waits, by rank: 200.0, 0.0"]
    named = [words.text for words in drawn.words if words.anchor == "middle"]
    assert named[:7] == ["forward", "backward", "buckets", "optimizer", "256 KiB", "1 MiB", "forward"]
    assert texts[-5:] == ["forward", "backward", "optimizer", "waits", "bucket under way"]
    root = ElementTree.fromstring(svg(drawn))
    assert len(root.findall("{http://www.w3.org/2000/svg}text")) == len(texts)


@pytest.mark.parametrize("width", [60.0, 300.0, 1000.0])
@pytest.mark.parametrize("events", [EVENTS, PIPELINE, [(r, "w", 0.0, r + 1.0, "wait") for r in range(40)]])
def test_nothing_is_cut_off(events, width):
    drawn = trace_picture(events, "a step of which there is much to say", width=width)
    for words in drawn.words:
        length = 0.5 * words.size * len(words.text)
        start = words.x - (length / 2 if words.anchor == "middle" else 0)
        assert start >= 0, words
        assert start + length <= drawn.width, words
        assert words.y < drawn.height
    for box in drawn.boxes:
        assert 0 <= box.x < box.x + box.width <= drawn.width
        assert box.y + box.height <= drawn.height


def test_what_is_short_is_still_seen_and_named_behind_itself():
    events = [(0, "0F0", 0.0, 1.0, "compute"), (0, "2 KiB", 0.2, 0.2001, "bucket"), (0, "4 KiB", 0.201, 0.5, "bucket")]
    drawn = trace_picture(events, "", width=1000.0)
    assert [box[1] for box in boxes_of(drawn, UNDER_WAY["bucket"])] == [2, 299]  # at least 1.5 points
    assert [words.text for words in drawn.words if words.size == 8] == ["bucket", "4 KiB"]  # there is no room for 2 KiB
    drawn = trace_picture(events[:2], "", width=1000.0)
    (name,) = [words for words in drawn.words if words.text == "2 KiB"]
    assert (name.anchor, name.x > boxes_of(drawn, UNDER_WAY["bucket"])[0][0]) == ("start", True)


@pytest.mark.parametrize(
    ("seconds", "ticks"),
    [(1.0, ["0 ms", "100", "200"]), (0.292, ["0 ms", "50", "100"]), (0.0011, ["0 ms", "0.2", "0.4"])],
)
def test_the_axis_has_round_numbers(seconds, ticks):
    drawn = trace_picture([(0, "forward", 3.0, 3.0 + seconds, "compute")], "", width=500.0)
    shown = [words for words in drawn.words if words.size == 9]
    assert [words.text for words in shown[:3]] == ticks
    lines = [box.x for box in drawn.boxes if box.fill == RULE]
    assert lines == [words.x for words in shown]
    assert lines[1] - lines[0] == pytest.approx(500 * float(ticks[1]) / 1e3 / seconds)
    assert 5 <= len(lines) <= 11


def test_of_a_pipeline_the_prediction_stands_above_on_the_same_axis():
    drawn = trace_picture(PIPELINE, "step 7", predicted=PREDICTED, width=1000.0)
    texts = [words.text for words in drawn.words]
    assert texts.index("predicted, from the median time of each stage's actions") < texts.index("measured")
    assert "all actions in 900.0 ms, predicted 1900.0 ms" in texts[1]
    predicted, measured = (box.y for box in drawn.boxes if box.fill == IDLE)
    # 2 s are 1000 points, and the prediction begins with the first action.
    assert boxes_of(drawn, COLOURS["forward"]) == [(50, 199, predicted), (50, 149, measured)]
    assert [box[1:] for box in boxes_of(drawn, COLOURS["backward"])] == [(749, predicted), (49, measured)]
    assert [box[1:] for box in boxes_of(drawn, COLOURS["weights"])] == [(49, measured)]
    assert texts.index("send") < texts.index("0F0 96 KiB") < texts.index("receive") < texts.index("1B0 96 KiB")
    legend = ["forward", "backward", "backward, weight half", "waits", "posts messages", "opens or closes the step"]
    assert texts[-8:] == [*legend, "send under way", "receive under way"]


def test_of_many_ranks_only_the_ends_of_waits_are_said():
    events = [(rank, "buckets", 0.0, 0.1 + 0.01 * rank, "wait") for rank in range(9)]
    assert trace_picture(events, "").words[1].text == "180.0 ms, of these in waits from 100.0 to 180.0"


def test_no_events_make_no_picture():
    with pytest.raises(ValueError, match="a picture of events needs some, got none"):
        trace_picture([], "step 0")


def test_a_schedule_is_known_by_its_actions():
    assert is_of_schedule([(0, "0W1 0W2", 0.0, 1.0, "compute"), (0, "open", 1.0, 2.0, "step")])
    assert not is_of_schedule(EVENTS)
    assert not is_of_schedule([(0, "open", 1.0, 2.0, "step")])

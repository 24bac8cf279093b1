"""The picture of what ranks did: a row a rank, lanes for what is under way, words where there is room."""

from xml.etree import ElementTree

import pytest

from pipeline.schedules.drawing.svg import IDLE, svg
from pipeline.schedules.drawing.trace import COLOURS, OTHER, UNDER_WAY, trace_picture
from pipeline.schedules.measured import is_of_schedule

EVENTS = [
    (0, "forward", 5.0, 5.2, "compute"),
    (0, "backward", 5.2, 5.7, "compute"),
    (0, "buckets", 5.7, 5.9, "wait"),
    (0, "0.25 MiB", 5.3, 5.8, "bucket"),
    (0, "1.00 MiB", 5.5, 5.9, "bucket 2"),
    (0, "optimizer", 5.9, 6.0, "compute"),
    (1, "forward", 5.0, 5.5, "compute"),
]


def test_lengths_are_times_and_each_rank_has_its_row():
    drawn = trace_picture(EVENTS, "step 3", width=100.0)
    rows = [box for box in drawn.boxes if box.fill == IDLE]
    assert [row.width for row in rows] == [100, 100]
    left = rows[0].x

    def of(colour):
        return [(round(b.x - left), round(b.width), b.y) for b in drawn.boxes if b.fill == colour and b.width != 12]

    assert of(COLOURS["forward"]) == [(0, 20, rows[0].y), (0, 50, rows[1].y)]
    assert of(COLOURS["backward"]) == [(20, 50, rows[0].y)]
    assert of(OTHER["wait"]) == [(70, 20, rows[0].y)]
    assert of(COLOURS["optimizer"]) == [(90, 10, rows[0].y)]
    lanes = of(UNDER_WAY)
    assert [lane[:2] for lane in lanes] == [(30, 50), (50, 40)]
    assert rows[0].y + rows[0].height < lanes[0][2] < lanes[1][2] < rows[1].y


def test_words_say_what_it_is_and_stay_in_their_boxes():
    drawn = trace_picture(EVENTS, "step 3 <dp>", width=500.0)
    texts = [words.text for words in drawn.words]
    assert texts[:2] == ["step 3 <dp>", "1000.0 ms, of these in waits, by rank: 200.0, 0.0"]
    assert [w.text for w in drawn.words if w.anchor == "middle"] == ["forward", "backward", "buckets", "forward"]
    assert texts[-5:] == ["forward", "backward", "wait", "bucket under way", "optimizer"]
    root = ElementTree.fromstring(svg(drawn))
    assert len(root.findall("{http://www.w3.org/2000/svg}text")) == len(texts)


def test_no_events_make_no_picture():
    with pytest.raises(ValueError, match="a picture of events needs some, got none"):
        trace_picture([], "step 0")


def test_a_schedule_is_known_by_its_actions():
    assert is_of_schedule([(0, "0W1 0W2", 0.0, 1.0, "compute"), (0, "open", 1.0, 2.0, "step")])
    assert not is_of_schedule(EVENTS)
    assert not is_of_schedule([(0, "open", 1.0, 2.0, "step")])

import json
from itertools import pairwise

from pipeline import SCHEDULES, Event, events, perfetto, simulate


def test_a_timeline_is_a_list_of_events():
    timeline = simulate(SCHEDULES["1f1b"].orders(2, 1), num_stages=2)
    assert events(timeline, seconds=2) == [
        Event(0, "0F0", 0, 2, "compute"),
        Event(0, "0BW0", 8, 12, "compute"),
        Event(1, "1F0", 2, 4, "compute"),
        Event(1, "1BW0", 4, 8, "compute"),
    ]
    assert events(timeline)[1][2:4] == (0.004, 0.006)  # a unit is a millisecond unless said otherwise


def test_a_trace_has_a_process_a_rank_and_a_thread_a_category():
    log = [
        Event(1, "1F0", 0.5, 0.75, "compute"),
        Event(0, "0F0", 0.0, 0.5, "compute"),
        Event(0, "0SEND_F0", 0.5, 0.625, "send"),
    ]
    trace = json.loads(perfetto(log))
    named = {(r["name"], r["pid"], r.get("tid"), *r["args"].values()) for r in trace["traceEvents"] if r["ph"] == "M"}
    assert named == {
        ("process_name", 0, None, "rank 0"),
        ("process_name", 1, None, "rank 1"),
        ("process_sort_index", 0, None, 0),
        ("process_sort_index", 1, None, 1),
        ("thread_name", 0, 0, "compute"),
        ("thread_name", 0, 1, "send"),
        ("thread_name", 1, 0, "compute"),
    }
    assert [r for r in trace["traceEvents"] if r["ph"] == "X"] == [
        {"ph": "X", "name": "1F0", "cat": "compute", "pid": 1, "tid": 0, "ts": 500000, "dur": 250000},
        {"ph": "X", "name": "0F0", "cat": "compute", "pid": 0, "tid": 0, "ts": 0, "dur": 500000},
        {"ph": "X", "name": "0SEND_F0", "cat": "send", "pid": 0, "tid": 1, "ts": 500000, "dur": 125000},
    ]


def test_neighbours_do_not_overlap_by_a_rounding_error():
    orders = SCHEDULES["zero_bubble_h2"].orders(3, 9)
    timeline = simulate(orders, num_stages=3, forward=0.1, backward_input=1 / 3, backward_weight=0.7)
    records = [r for r in json.loads(perfetto(events(timeline)))["traceEvents"] if r["ph"] == "X"]
    for rank in range(3):
        row = [r for r in records if r["pid"] == rank]
        assert all(round(a["ts"] + a["dur"], 3) <= b["ts"] for a, b in pairwise(row))

"""Schedules as data: pure Python, drawn, proved and timed where there is neither an array nor a communicator."""

from pipeline.schedules.action import BW, Action, B, F, Kind, ScheduleError, W
from pipeline.schedules.orders import forward_only, gpipe, one_f_one_b, zbv, zero_bubble_h1, zero_bubble_h2
from pipeline.schedules.schedule import FORWARD_ONLY, SCHEDULES, Schedule, interleaved_1f1b, looped_bfs

__all__ = [
    "BW",
    "FORWARD_ONLY",
    "SCHEDULES",
    "Action",
    "B",
    "F",
    "Kind",
    "Schedule",
    "ScheduleError",
    "W",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "one_f_one_b",
    "zbv",
    "zero_bubble_h1",
    "zero_bubble_h2",
]

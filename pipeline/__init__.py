"""Pipeline parallelism: schedules as data, checked and drawn without a process."""

from pipeline.action import BW, Action, B, F, Kind, ScheduleError, W
from pipeline.check import validate
from pipeline.draw import draw, draw_order
from pipeline.lower import lower
from pipeline.partition import StageSpec, cut, partition_by_count
from pipeline.schedules import SCHEDULES, Schedule, gpipe, one_f_one_b
from pipeline.simulate import Timed, Timeline, simulate

__all__ = [
    "BW",
    "SCHEDULES",
    "Action",
    "B",
    "F",
    "Kind",
    "Schedule",
    "ScheduleError",
    "StageSpec",
    "Timed",
    "Timeline",
    "W",
    "cut",
    "draw",
    "draw_order",
    "gpipe",
    "lower",
    "one_f_one_b",
    "partition_by_count",
    "simulate",
    "validate",
]

"""Pipeline parallelism: schedules as data, checked and drawn without a process, run by one executor."""

from pipeline.action import BW, Action, B, F, Kind, ScheduleError, W
from pipeline.check import validate
from pipeline.draw import draw, draw_order
from pipeline.executor import PipelineExecutor, PipelineOutput
from pipeline.lower import lower
from pipeline.partition import StageSpec, cut, partition_by_count
from pipeline.schedules import SCHEDULES, Schedule, gpipe, one_f_one_b
from pipeline.simulate import Timed, Timeline, simulate
from pipeline.stage import LocalStages, PipelineStage

__all__ = [
    "BW",
    "SCHEDULES",
    "Action",
    "B",
    "F",
    "Kind",
    "LocalStages",
    "PipelineExecutor",
    "PipelineOutput",
    "PipelineStage",
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

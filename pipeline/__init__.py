"""Pipeline parallelism: schedules as data, checked and drawn without a process, run by one executor."""

from pipeline.action import BW, Action, B, F, Kind, ScheduleError, W
from pipeline.check import validate
from pipeline.deadlock import Collective, prove
from pipeline.draw import draw, draw_order
from pipeline.executor import PipelineExecutor, PipelineOutput
from pipeline.layer_times import layer_seconds
from pipeline.lower import lower
from pipeline.orders import forward_only, gpipe, one_f_one_b
from pipeline.partition import StageSpec, cut, cut_by_sizes, cut_by_weights, partition_by_count
from pipeline.picture import Picture, picture, svg
from pipeline.png import write_png
from pipeline.schedules import FORWARD_ONLY, SCHEDULES, Schedule, interleaved_1f1b, looped_bfs
from pipeline.simulate import Timed, Timeline, simulate
from pipeline.stage import LocalStages, PipelineStage
from pipeline.text import dump, from_text, load
from pipeline.trace import Event, events, perfetto
from pipeline.zero_bubble import zbv, zero_bubble_h1, zero_bubble_h2

__all__ = [
    "BW",
    "FORWARD_ONLY",
    "SCHEDULES",
    "Action",
    "B",
    "Collective",
    "Event",
    "F",
    "Kind",
    "LocalStages",
    "Picture",
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
    "cut_by_sizes",
    "cut_by_weights",
    "draw",
    "draw_order",
    "dump",
    "events",
    "forward_only",
    "from_text",
    "gpipe",
    "interleaved_1f1b",
    "layer_seconds",
    "load",
    "looped_bfs",
    "lower",
    "one_f_one_b",
    "partition_by_count",
    "perfetto",
    "picture",
    "prove",
    "simulate",
    "svg",
    "validate",
    "write_png",
    "zbv",
    "zero_bubble_h1",
    "zero_bubble_h2",
]

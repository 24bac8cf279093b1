"""Pipeline parallelism: schedules as data, checked and drawn without a process, run by one executor.

Schedules are plain Python. What needs arrays or a communicator is imported when it is first asked for, so
`import pipeline.schedules` works where NumPy is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.schedules.action import BW, Action, B, F, Kind, ScheduleError, W
from pipeline.schedules.csv_file import dump, from_text, load
from pipeline.schedules.deadlock import Collective, check_deadlock_free
from pipeline.schedules.drawing.png import write_png
from pipeline.schedules.drawing.svg import Picture, picture, svg
from pipeline.schedules.drawing.text import draw, draw_order
from pipeline.schedules.lower import lower
from pipeline.schedules.measured import events
from pipeline.schedules.orders import forward_only, gpipe, one_f_one_b, zbv, zero_bubble_h1, zero_bubble_h2
from pipeline.schedules.schedule import FORWARD_ONLY, SCHEDULES, Schedule, interleaved_1f1b, looped_bfs
from pipeline.schedules.simulate import simulate
from pipeline.schedules.timeline import Timed, Timeline
from pipeline.schedules.validate import validate

if TYPE_CHECKING:
    from distributed.trace.perfetto import Event, perfetto
    from pipeline.runtime.executor import PipelineExecutor, PipelineOutput
    from pipeline.runtime.layer_times import layer_seconds
    from pipeline.runtime.local_stages import LocalStages
    from pipeline.runtime.partition import StageSpec, cut, cut_by_sizes, cut_by_weights, partition_by_count
    from pipeline.runtime.stage import PipelineStage

_IMPORTED_WHEN_ASKED_FOR = {
    "Event": "distributed.trace.perfetto",
    "LocalStages": "pipeline.runtime.local_stages",
    "PipelineExecutor": "pipeline.runtime.executor",
    "PipelineOutput": "pipeline.runtime.executor",
    "PipelineStage": "pipeline.runtime.stage",
    "StageSpec": "pipeline.runtime.partition",
    "cut": "pipeline.runtime.partition",
    "cut_by_sizes": "pipeline.runtime.partition",
    "cut_by_weights": "pipeline.runtime.partition",
    "layer_seconds": "pipeline.runtime.layer_times",
    "partition_by_count": "pipeline.runtime.partition",
    "perfetto": "distributed.trace.perfetto",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_ASKED_FOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_WHEN_ASKED_FOR[name]), name)


def __dir__() -> list[str]:
    return __all__


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
    "check_deadlock_free",
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
    "simulate",
    "svg",
    "validate",
    "write_png",
    "zbv",
    "zero_bubble_h1",
    "zero_bubble_h2",
]

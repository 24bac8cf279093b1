"""In what order a captured step is called, on a CuPy that only notes it; test_gpu_graph.py has the GPU's numbers."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from minigrad.cuda_graph import CapturedStep


class Noted(nullcontext):
    """A stream, a graph and an optimizer in one, which note what they are told."""

    ptr = 1
    asks_nothing = True
    is_captured = False

    def __init__(self):
        super().__init__()
        self.log = []

    def step(self, x):
        self.log.append("capture" if self.is_captured else f"step of {len(x)}")

    def begin_capture(self):
        pass

    def end_capture(self):
        return self

    def launch(self, stream):
        self.log.append("replay")

    def trained(self):
        return (True,)

    def advance(self):
        self.log.append("advance")

    def finish(self):
        self.log.append("finish")


@pytest.fixture
def noted(monkeypatch):
    noted = Noted()
    cuda = SimpleNamespace(
        Stream=lambda: noted, MemoryPool=lambda: SimpleNamespace(malloc=None), using_allocator=nullcontext
    )
    monkeypatch.setattr("minigrad.cuda_graph.cupy", lambda: SimpleNamespace(cuda=cuda, empty=np.empty))
    return noted


def test_a_graph_begins_when_the_step_before_it_is_over(noted):
    """A graph reads parameters where they lie, and one that is not captured lets them be gathered while others run."""
    run = CapturedStep(noted.step, noted)
    for length in (4, 4, 4, 3, 4):
        run(np.zeros(length))
    expected = ["step of 4"] * 2 + [
        "finish",
        "capture",
        "advance",
        "replay",
        "step of 3",
        "finish",
        "advance",
        "replay",
    ]
    assert noted.log == expected

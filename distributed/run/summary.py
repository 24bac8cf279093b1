"""What a run came to: the figures of its `summary.json`, and words for the screen."""

from __future__ import annotations

import math
from typing import Any

from distributed.run.plots import Metrics, speed_text, totals
from minigrad.words import counted


def summarize(lines: Metrics, samples: str, speed: str) -> tuple[dict[str, Any], str]:
    """Return the figures of a run's summary, and what to say of them.

    Args:
        lines: of its metrics, one a step; at least one.
        samples: what speed is counted in.
        speed: the name of the speed among the figures.
    """
    seconds, samples_per_second, waited = totals(lines)
    figures = {"steps": len(lines), "seconds": seconds, "loss": lines[-1]["loss"], speed: samples_per_second}
    time_taken = f"{seconds:.0f} s" if seconds > 10 else f"{seconds:.1f} s"
    words = f"{counted(len(lines), 'step')} in {time_taken}, {speed_text(samples_per_second or 0.0)} {samples}/s"
    if waited is not None:
        figures["exposed_comm_share"] = waited
        words += f", {waited:.0%} of it in waits for other ranks"
    num_skipped = sum(_was_skipped(line) for line in lines)
    if num_skipped:
        figures["skipped_steps"] = num_skipped
        words += f"; {num_skipped} skipped, with gradients that were not finite"
    return figures, words


def _was_skipped(line: dict[str, Any]) -> bool:
    """Return whether no rank took this step; in a line that was read, null is a number that is not finite."""
    norm = line.get("grad_norm", 0.0)
    return norm is None or not math.isfinite(norm)

"""Where a benchmark's report is kept: what its command measures by default, never a quick look."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


def keep(lines: Iterable[str], path: Path, *, is_default: bool) -> None:
    """Write the lines of a report to a file, if they were made as the command makes them without options."""
    if is_default:
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    else:
        print(f"not kept: results/{path.name} has what is measured without options")

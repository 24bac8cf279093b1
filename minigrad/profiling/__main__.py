"""Run a training script, and say at its end where the time of its ops went: see the package."""

from __future__ import annotations

import runpy
import sys
from argparse import REMAINDER
from collections.abc import Sequence
from pathlib import Path

from minigrad.command_parser import CommandParser
from minigrad.profiling.calls import watching
from minigrad.profiling.floors import table

PROGRAM = "python -m minigrad.profiling"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, which is the script's."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Run a script of one process and print a table of its time by op, beside the least that its matrix "
        "products and its bytes need. A dozen steps are enough.",
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=REMAINDER, help="of the script").required = False
    args = parser.parse_args(argv)
    script = Path(args.script)
    if not script.is_file():
        print(f"{PROGRAM}: there is no file {args.script}", file=sys.stderr)
        return 2
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(script.resolve().parent))  # as `python script.py` does
    code: object = 0
    with watching() as calls:
        try:
            runpy.run_path(args.script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    for line in table(calls):
        print(line)
    if isinstance(code, str):
        print(code, file=sys.stderr)
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    sys.exit(main())

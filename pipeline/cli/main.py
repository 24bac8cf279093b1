"""`python -m pipeline COMMAND`: one file a command, each with a line of help, its arguments, and what it does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from distributed.run.command_line import speak_for_all
from minigrad.command_parser import CommandParser
from pipeline.cli import check, compare, draw, dump, files, memory, repair, search, simulate, sweep, verify
from pipeline.cli.own_code import one_line, place_of

PROGRAM = "python -m pipeline"
COMMANDS = {
    "draw": draw,
    "simulate": simulate,
    "compare": compare,
    "check": check,
    "verify": verify,
    "sweep": sweep,
    "memory": memory,
    "repair": repair,
    "search": search,
    "dump": dump,
}


class _Parser(CommandParser):
    """Says things once, though every rank of `verify` reads the same command line."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            speak_for_all(message.rstrip(), everywhere=False)
        sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 2 for a wrong name or value, or an error in a person's own code."""
    parser = _Parser(
        prog=PROGRAM,
        description="Look at pipeline schedules, and verify that a model trains in one as in one process.",
        epilog=f"for example: {PROGRAM} draw 1f1b --stages 4 --microbatches 8",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    parsed, late = parser.parse_known_args(arguments)
    if late and (not hasattr(parsed, "schedules") or any(word.startswith("-") for word in late)):
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    if late:  # argparse takes a list to have ended at the first flag
        parsed.schedules = [*parsed.schedules, *late]
    try:
        files.check_files(parsed)
        COMMANDS[parsed.command].run(parsed)
    except Exception as error:
        is_of_own_code = place_of(error) is not None
        if not is_of_own_code and not isinstance(error, (ValueError, RuntimeError, OSError)):
            raise
        speak_for_all(f"{PROGRAM}: {one_line(error) if is_of_own_code else error}", everywhere=False)
        return 2
    return 0

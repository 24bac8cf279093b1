"""The parser of commands such as `python -m minigrad.generate`: what is wrong with a flag is one line."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

_KINDS = {"int": "an integer", "float": "a number"}
_NO_NUMBER = re.compile(rf"argument (\S+): invalid ({'|'.join(_KINDS)}) value: (.*)")


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, the rule and what was given, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        if found := _NO_NUMBER.fullmatch(message):
            flag, kind, got = found.groups()
            message = f"{flag} must be {_KINDS[kind]}, got {got}"
        self.exit(2, f"{self.prog}: {message}\n")

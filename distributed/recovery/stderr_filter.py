"""What a job says on stderr, byte by byte as it comes, but for what Open MPI says about ranks that die.

A progress bar never ends its line, so nothing waits for a line's end but what may become one that is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import IO

from distributed.comm.outcome import LOST

# What Open MPI says about the dead: whole lines, and words that it ends with no newline, so that anything may follow.
# Those of its parts that have sockets say first where they are, as [host:process], and why they close one.
_SOCKETS = (b"pmix_ptl_base", b"oob:tcp", b"prte_oob_tcp", b"mca_btl_tcp")
_PLACE = rb"\[[\w.,:/\[\]-]*\] "
_GONE = rb"(?:%b)\S* .*(?:Broken pipe|Connection reset by peer).*" % b"|".join(_SOCKETS)
_NOISE = re.compile(
    rb"NBC_Progress: .*|Error in (?:NBC_Start_round|MPI_Isend|MPI_Irecv)\(.*\) \(-?\d+\)|\[warn\] Epoll .*|-{60,}"
    rb"|prterun noticed .*|signal \d+ \([\w ]+\)\.|(?:%b)+%b|\s*" % (_PLACE, _GONE)
)
_MAY_BE_A_PLACE = re.compile(rb"(?:%b)*(?:\[[\w.,:/\[\]-]* ?)?" % _PLACE)
_BEGINNINGS = (
    *_SOCKETS,
    b"NBC_Progress: ",
    b"Error in NBC_Start_round(",
    b"Error in MPI_I",
    b"[warn] Epoll ",
    b"-" * 60,
    b"prterun noticed ",
    b"signal ",
    b"LAUNCHER JOB",
    LOST.encode(),
    b"\0",
)
_UNENDED_NOISE = b"LAUNCHER JOB OBJECT NOT FOUND"


def pass_on(source: int, sink: IO[bytes], lose: Callable[[str], None]) -> None:
    """Copy a pipe to its end.

    Args:
        source: its descriptor.
        sink: where the rest goes.
        lose: called with the reason when a rank says that the job is lost.
    """
    begun = b""  # of a line, which may be noise
    passing = False  # the beginning of this line was passed on, so the rest is
    while chunk := os.read(source, 1 << 16):
        *ended, begun = (begun + chunk).split(b"\n")
        for line in ended:
            text = line + b"\n"
            said = line.replace(b"\0", b"")
            if said.startswith(LOST.encode()):
                lose(said[len(LOST) :].decode(errors="replace"))
                text = b""
            elif not passing:
                text = without_noise(text)
            sink.write(text)
            passing = False
        if begun and (passing or not _may_be_noise(begun)):
            sink.write(begun)
            begun, passing = b"", True
        sink.flush()
    sink.write(begun if passing else without_noise(begun))
    sink.flush()


def _may_be_noise(begun: bytes) -> bool:
    place = _MAY_BE_A_PLACE.match(begun)
    assert place is not None  # it matches no bytes too
    said = begun[place.end() :]
    return any(text.startswith(word) or word.startswith(text) for text in (begun, said) for word in _BEGINNINGS)


def without_noise(line: bytes) -> bytes:
    """Return a line without what Open MPI says about ranks that die: b"" where there is nothing else in it."""
    said = line.replace(b"\0", b"").replace(_UNENDED_NOISE, b"")
    return b"" if _NOISE.fullmatch(said.rstrip(b"\n")) else said

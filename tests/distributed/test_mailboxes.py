"""Messages by mailbox: what a graph replays again and again, with a CuPy that is faked (`fake_cupy.py`).

test_gpu_pipeline.py has pipelines whose messages go so, on a GPU.
"""

from __future__ import annotations

import time
from typing import Any

import fake_cupy
import numpy as np
import pytest

from distributed import LocalWorld
from distributed.comm.nccl import mailboxes
from distributed.comm.nccl.mailboxes import MAILBOX_BYTES, NUM_SLOTS, Mailboxes, Slot

PAIRS = [(0, 1), (1, 0)]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_cupy.install(monkeypatch)
    module.cuda.runtime.is_capturing = True
    return module


def run(cupy: Any, program: Any, flags: Any = None) -> list[Any]:
    def on_rank(host: Any) -> Any:
        made = Mailboxes(host, PAIRS, cp=cupy, flags=flags or fake_cupy.StreamFlags())
        return program(host, made)

    return LocalWorld(2, timeout_seconds=10).run(on_rank)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slot_is_used_in_each_step_and_no_message_covers_the_one_before(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """As a graph does that is replayed: whoever comes first waits for the other."""
    monkeypatch.setattr(mailboxes._End, "new_slot", lambda end, num_bytes: Slot(3, 512))

    def program(host: Any, made: Mailboxes) -> None:
        pair, back = (host.rank, 1 - host.rank), (1 - host.rank, host.rank)
        for step in range(8):
            time.sleep(0.002 * (host.rank == slow))
            sent = cupy.full(6, 10 * step + host.rank, np.float32)
            work, slot = made.send(sent, pair)
            array = made.receive(cupy.zeros(6, np.float32), back, slot).wait()
            assert array.tolist() == [10 * step + 1 - host.rank] * 6
            assert work.wait() is sent

    run(cupy, program)


def test_what_a_rank_sends_is_gone_before_it_waits(cupy: Any) -> None:
    """Else the wait could hold up the copy that the other rank needs first, where both share a queue of the GPU."""

    def program(host: Any, made: Mailboxes) -> None:
        sent = cupy.ones(4)
        work, slot = made.send(sent, (host.rank, 1 - host.rank))
        arrived = made.receive(cupy.zeros(4), (1 - host.rank, host.rank), slot)
        assert not arrived.test()
        assert made._pushes == [work]
        assert arrived.wait().tolist() == [1] * 4
        assert made._pushes == []
        assert arrived.test()
        assert arrived.wait().tolist() == [1] * 4  # once taken it is there

    run(cupy, program)


def test_messages_have_slots_of_their_own_until_the_mailbox_is_full(cupy: Any) -> None:
    def program(host: Any, made: Mailboxes) -> list[Any]:
        end = made._ends[host.rank, 1 - host.rank]
        assert made.send(cupy.zeros(0), (host.rank, 1 - host.rank)) is None
        slots = [end.new_slot(size) for size in (1000, 24, mailboxes.MAILBOX_BYTES - 1280, 1)]
        for _ in range(NUM_SLOTS):
            end.new_slot(1)
        return [*slots, end.new_slot(1)]

    expected = [Slot(0, 0), Slot(1, 1024), Slot(2, 1280), None, None]
    assert run(cupy, program) == [expected, expected]
    assert mailboxes.MAILBOX_BYTES < MAILBOX_BYTES  # the fake's are small


def test_where_memory_cannot_be_shared_or_written_there_are_none(cupy: Any) -> None:
    def connected(host: Any, made: Mailboxes) -> list[bool]:
        return [made.connects(pair) for pair in PAIRS]

    class Lost(fake_cupy.StreamFlags):
        def write(self, stream: int, at: int, value: int) -> None: ...

    class Refused(fake_cupy.StreamFlags):
        def write(self, stream: int, at: int, value: int) -> None:
            raise RuntimeError("not here")

    assert run(cupy, connected) == [[True, True]] * 2
    assert run(cupy, connected, Lost()) == [[False, False]] * 2
    assert run(cupy, connected, Refused()) == [[False, False]] * 2
    cupy.cuda.runtime.opens_memory = False
    assert run(cupy, connected) == [[False, False]] * 2
    cupy.cuda.runtime.opens_memory, cupy.cuda.runtime.shares_memory = True, False
    assert run(cupy, connected) == [[False, False]] * 2

"""Waits for asyncio.

The functions try, and sleep between the tries, first 0.2 ms and later up to 10 ms: no thread waits. Cancelling the task ends a
wait, and loses nothing: a message or a slot is taken only by the try that returns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ._errors import TimeoutError

if TYPE_CHECKING:
    from ._native import Channel, Export, Listener, Received, Ring, RingReader, RingReadSlot, RingWriteSlot

T = TypeVar("T")

_FIRST, _LONGEST = 0.0002, 0.01


async def released(export: Export, timeout: float | None = None) -> None:
    """Waits until a process has opened the export and no process holds it any longer."""
    await _retry(lambda: export.wait_released(0), timeout)


async def readers(ring: Ring, count: int = 1, timeout: float | None = None) -> None:
    """Waits until a ring has this many readers."""
    await _retry(lambda: ring.wait_readers(count, 0), timeout)


async def write(ring: Ring, timeout: float | None = None) -> RingWriteSlot:
    """Waits for the next slot for writing."""
    return await _retry(lambda: ring.write(timeout=0), timeout)


async def next(reader: RingReader, timeout: float | None = None) -> RingReadSlot | None:
    """Waits for the next publication. `None` at the end of the ring."""
    return await _retry(lambda: reader.next(0), timeout)


async def accept(listener: Listener, timeout: float | None = None) -> Channel:
    """Waits for a process that connects."""
    return await _retry(lambda: listener.accept(0), timeout)


async def receive(channel: Channel, timeout: float | None = None) -> Received:
    """Waits for the next message."""
    return await _retry(lambda: channel.receive(0), timeout)


async def _retry(attempt: Callable[[], T], timeout: float | None) -> T:
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    pause = _FIRST
    while True:
        try:
            return attempt()
        except TimeoutError:
            if deadline is not None and loop.time() >= deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST)

"""Waits for asyncio.

The event loop waits for the descriptors of the library: no thread waits, and nothing polls. A message, a slot or a connection
is taken only by the attempt that returns it, so cancelling a task loses nothing. Tasks that wait for one object take turns in
the order in which they began to wait; tasks of two event loops cannot wait for one object.

``call`` is for the calls that have no descriptor, because they make driver calls.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from . import _native, _streams
from ._errors import TimeoutError

if TYPE_CHECKING:
    from ._native import Channel, Export, Listener, Received, Ring, RingReader, RingReadSlot, RingWriteSlot

# Without `next`: an import of all names shadows no built-in one.
__all__ = ["accept", "call", "opened", "readers", "receive", "released", "send", "write"]

# The turn in which a task has written a ring last; tasks inherit the value of the task that made them.
_writes: ContextVar[tuple[int, asyncio.Task[Any] | None, int | None] | None] = ContextVar("_writes", default=None)

P = ParamSpec("P")
T = TypeVar("T")


async def released(export: Export, timeout: float | None = None) -> None:
    """Waits until a process has opened the export and no process holds it any longer.

    ``timeout`` is in seconds; ``None`` is no limit. Raises as ``export.wait_released`` does: ``StillHeldError`` after
    ``timeout``, ``HolderDiedError`` if a process died while it used the memory.
    """
    await _changed(export, lambda: export.wait_released(0), timeout)


async def opened(export: Export, count: int = 1, timeout: float | None = None) -> None:
    """Waits until the export has been opened this many times.

    ``count`` is that number. ``timeout`` is in seconds; ``None`` is no limit. Raises ``TimeoutError`` after it, and
    ``ValueError`` if the export is closed.
    """
    await _changed(export, lambda: export.wait_opened(count, 0), timeout)


async def readers(ring: Ring, count: int = 1, timeout: float | None = None) -> None:
    """Waits until a ring has this many readers.

    ``count`` is that number. ``timeout`` is in seconds; ``None`` is no limit. Raises ``TimeoutError`` after it, and
    ``ValueError`` if the ring is closed.
    """
    await _changed(ring, lambda: ring.wait_readers(count, 0), timeout)


async def write(ring: Ring, stream: object | None = None, timeout: float | None = None) -> RingWriteSlot:
    """Waits for the next slot for writing. Tasks take turns: the call waits until another task has published or dropped its slot.

    ``ring`` is that of one event loop, ``stream`` as in ``ring.write``. ``timeout`` is in seconds; ``None`` is no limit. Raises
    ``TimeoutError`` after it, and ``ValueError`` if the ring is closed or this task is writing a slot already.
    """
    task = asyncio.current_task()

    def attempt() -> RingWriteSlot:
        try:
            return ring.write(stream, timeout=0)
        except TimeoutError as error:
            if _writes.get() == (id(ring), task, ring._turn):
                raise ValueError("this task is writing a slot of the ring already; publish or drop it first") from None
            raise

    slot = await _wait(ring, ring.fileno, attempt, timeout)
    _writes.set((id(ring), task, ring._turn))
    return slot


async def next(reader: RingReader, timeout: float | None = None) -> RingReadSlot | None:
    """Waits for the next publication. `None` at the end of the ring.

    ``reader`` is that of one event loop. ``timeout`` is in seconds; ``None`` is no limit. Raises ``TimeoutError`` after
    it, ``GoneError`` if the writer's process has ended, and ``ValueError`` if the reader is closed.
    """
    return await _wait(reader, reader.fileno, lambda: reader.next(0), timeout)


async def accept(listener: Listener, timeout: float | None = None) -> Channel:
    """Waits for a process that connects.

    ``listener`` is that of one event loop. ``timeout`` is in seconds; ``None`` is no limit. Raises ``TimeoutError`` after
    it, and ``ValueError`` if the listener is closed.
    """
    return await _wait(listener, listener.fileno, lambda: listener.accept(0), timeout)


async def receive(channel: Channel, timeout: float | None = None) -> Received:
    """Waits for the next message.

    ``channel`` is that of one event loop. ``timeout`` is in seconds; ``None`` is no limit. Raises ``TimeoutError`` after
    it, ``GoneError`` if the peer has ended and no message is left, and ``ValueError`` if the channel is closed.
    """
    return await _wait(channel, channel.fileno, lambda: channel.receive(0), timeout)


async def send(
    channel: Channel,
    data: bytes | None = None,
    *memory: Any,
    ready: object | None = None,
    reply_to: Received | None = None,
    timeout: float | None = None,
) -> None:
    """Sends a message when there is room for it.

    ``data`` are the bytes, ``memory`` what the message brings, ``ready`` and ``reply_to`` as in ``channel.send``.
    ``timeout`` is in seconds; ``None`` is no limit. Raises ``TimeoutError`` after it, ``GoneError`` if the peer has
    closed the channel or ended, and ``ValueError`` if this side has closed it.
    """
    known = (_native.Export, _native.Descriptor)
    parts = [part if isinstance(part, known) else _native.share(part, ready=ready) for part in memory]
    attempt = lambda: channel.send(data, *parts, ready=ready, reply_to=reply_to, timeout=0)  # noqa: E731
    await _wait(channel, channel.send_fileno, attempt, timeout)


async def call(function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> T:
    """Runs a call that opens, connects or closes (``open``, ``join``, ``connect``, ``Export.close``) on a thread of its own, with
    the caller's current stream. If the task is cancelled, the call continues there, and its result is dropped.

    Calls ``function`` with ``arguments`` and ``options``; returns its result, and raises its exception.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    streams = _streams.carry()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, failed = None, None
        try:
            with streams:
                result = function(*arguments, **options)
        except BaseException as error:
            failed = error
        try:
            loop.call_soon_threadsafe(deliver, result, failed)
        except RuntimeError:
            pass  # The loop was closed.

    # A daemon, so that the process can exit although another process does not answer.
    threading.Thread(target=run, name="device-ipc-call", daemon=True).start()
    return await future


class _Queue:
    """The tasks of one event loop that wait for one descriptor."""

    def __init__(self, key: tuple[int, str], owner: object, descriptor: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiters: deque[asyncio.Future[None]] = deque()
        self._key = key
        # Keeps `key` unique.
        self._owner = owner
        # A duplicate, because the owner may close its descriptor while tasks wait.
        self._descriptor = os.dup(descriptor)
        self.loop.add_reader(self._descriptor, self.wake)

    def close(self) -> None:
        del _queues[self._key]
        if not self.loop.is_closed():
            self.loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def wake(self) -> None:
        """Has the first task make an attempt."""
        if self.waiters and not self.waiters[0].done():
            self.waiters[0].set_result(None)

    def wake_all(self) -> None:
        """Has every task make an attempt."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def take(self, attempt: Callable[[], T], timeout: float | None) -> T:
        waiter = self.loop.create_future()
        self.waiters.append(waiter)
        late = False

        def expire() -> None:
            nonlocal late
            late = True
            if not waiter.done():
                waiter.set_result(None)

        timer = None if timeout is None else self.loop.call_later(timeout, expire)
        try:
            while True:
                await waiter
                try:
                    return attempt()
                except TimeoutError as error:
                    if late:
                        raise _with_time(error, timeout)
                place = self.waiters.index(waiter)
                waiter = self.waiters[place] = self.loop.create_future()
        finally:
            if timer is not None:
                timer.cancel()
            self.waiters.remove(waiter)
            if self.waiters:
                # This task may have been woken without need.
                self.wake()
            else:
                self.close()


_queues: dict[tuple[int, str], _Queue] = {}
_lock = threading.Lock()


async def _wait(owner: object, fileno: Callable[[], int], attempt: Callable[[], T], timeout: float | None) -> T:
    key = (id(owner), fileno.__name__)
    with _lock:
        queue = _queues.get(key)
        if queue is not None and queue.loop.is_closed():
            queue.close()
            queue = None
        if queue is None:
            try:
                return attempt()
            except TimeoutError:
                if timeout is not None and timeout <= 0:
                    raise
            queue = _queues[key] = _Queue(key, owner, fileno())
            # Another thread may have changed the object since the attempt.
            queue.loop.call_soon(queue.wake)
        elif queue.loop is not asyncio.get_running_loop():
            raise RuntimeError(f"a task of another event loop waits for {owner!r}; wait for an object in one event loop")
    return await queue.take(attempt, timeout)


async def _changed(shared: Export | Ring, attempt: Callable[[], T], timeout: float | None) -> T:
    # A descriptor of its own: a wait that clears it takes no change from another one.
    changes = shared.changes()

    def clear_and_attempt() -> T:
        changes.clear()
        return attempt()

    return await _wait(changes, changes.fileno, clear_and_attempt, timeout)


def _wake(owner: int) -> None:
    """Has the tasks that wait for the object of this identity make an attempt. Called by the extension module."""
    for (identity, _), queue in list(_queues.items()):
        if identity == owner:
            try:
                queue.loop.call_soon_threadsafe(queue.wake_all)
            except RuntimeError:
                pass  # The loop was closed.


def _with_time(error: TimeoutError, timeout: float | None) -> TimeoutError:
    """Returns the error of an attempt that did not wait with the time limit of the task."""
    error.args = (re.sub(r"\b0 ms", f"{(timeout or 0) * 1000:.0f} ms", str(error), count=1),)
    return error

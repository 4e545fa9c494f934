"""Passes the log events of the library to ``logging``.

A thread of Python does it, since the threads of the library must not wait for the interpreter. It starts with the first call that finds
a handler, and ends before the interpreter does. While it waits, it is in a system call, from which the end of the interpreter may end it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback

from . import _native

OFF = 1 << 30
"""A level that no event has."""

_EXIT_SECONDS = 5.0
"""The exit of the process waits this long for handlers, in seconds."""

_logger = logging.getLogger("device_ipc")
_lock = threading.Lock()
_level = OFF
_thread: threading.Thread | None = None
_pid = 0
_ended = False


def refresh() -> None:
    """Adopts the present configuration of ``logging``. Called by the extension module."""
    level = _configured()
    if level != _level:
        _adopt(level)


def _configured() -> int:
    """Returns the level of the logger, or ``OFF`` where it has no handler. Opens call it, so it is a loop without further calls."""
    level, is_handled = 0, False
    logger: logging.Logger | None = _logger
    while logger is not None:
        level = level or logger.level
        for handler in logger.handlers:
            if handler.__class__ is not logging.NullHandler:
                is_handled = True
        if not logger.propagate:
            if not level:
                level = logger.getEffectiveLevel()
            break
        logger = logger.parent
    disabled = _logger.manager.disable
    return (level if level > disabled else disabled + 1) if is_handled else OFF


def _adopt(level: int) -> None:
    global _level, _pid, _thread
    if _pid not in (0, os.getpid()):
        # A forked child of a process that logs has no thread for it.
        return
    with _lock:
        if _ended:
            return
        _native._log_level(level)
        _level = level
        if level == OFF or _thread is not None:
            return
        descriptor = _native._log_start()
        _pid = os.getpid()
        _thread = threading.Thread(target=_run, args=(descriptor,), name="device-ipc-log", daemon=True)
        _thread.start()
        atexit.register(_end)


def _run(descriptor: int) -> None:
    while True:
        ended = not os.read(descriptor, 4096)
        _pass_on()
        if ended:
            os.close(descriptor)
            return


def _pass_on() -> None:
    events, dropped = _native._log_take()
    if dropped:
        _logger.warning("%d log events were dropped: the handlers take longer than the events come", dropped)
    for level, name, text, seconds, thread in events:
        logger = logging.getLogger(name)
        if not logger.isEnabledFor(level):
            continue
        record = logger.makeRecord(name, level, "(device_ipc)", 0, text, (), None)
        record.created, record.msecs = seconds, seconds % 1 * 1000
        # Threads of Python have a name that the library does not know.
        record.thread, record.threadName = None, thread or None
        try:
            logger.handle(record)
        except Exception:
            # One handler must not end the log.
            traceback.print_exc()


def _end() -> None:
    """Passes the last events on, at the exit of the interpreter."""
    global _ended
    if _thread is None or _pid != os.getpid():
        return
    with _lock:
        _ended = True
    _native._log_stop()
    _thread.join(_EXIT_SECONDS)

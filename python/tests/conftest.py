"""All tests run on the mock, unless the environment names another backend."""

import os

os.environ.setdefault("DEVICE_IPC_BACKEND", "mock")
# With the kinds of memory of CUDA, so that what passes here passes there.
os.environ.setdefault("DEVICE_IPC_MOCK", "devices=2;like=cuda")

# Programs that the tests start have it too.
os.environ.setdefault("TEST_RUN", str(os.getpid()))

import faulthandler
import gc
import inspect
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import device_ipc

Start = Callable[..., "subprocess.Popen[str]"]

LIMIT = 120
"""Seconds in which what has ended is also gone, on a loaded machine."""


def unique(name: str) -> str:
    """Returns a name that no other run of the tests uses at the same time."""
    return f"{name}-{os.environ['TEST_RUN']}"


def suspend(process: "subprocess.Popen[str]") -> None:
    """Suspends a process; returns when all of its threads have stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


class Gate:
    """A point in a stream that the stream does not pass before the gate is opened: it waits for a timeline."""

    def __init__(self, stream: device_ipc.Stream) -> None:
        self._export = device_ipc.share(device_ipc.empty((1,), "uint8", stream.device))
        self._mapping = device_ipc.open(self._export.descriptor)
        self._mapping.timeline().wait(1, stream)
        (self._timeline,) = self._export.timelines(timeout=60)
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._timeline.signal_now(1)

    def open_soon(self) -> None:
        """Opens the gate in a moment, for a call that waits for the stream."""
        threading.Timer(0.1, self.open).start()


PRELUDE = f"""
import os
import sys
import threading
import numpy as np
import device_ipc
import device_ipc as d

{inspect.getsource(unique)}
{inspect.getsource(Gate)}
"""


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Ends a test that hangs, with the stacks of all threads."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program in a process with pipes, which is killed and reaped after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", PRELUDE + textwrap.dedent(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            # A background job of a shell ignores SIGINT, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=30)


def profiled(hook: "Callable[[FrameType, str, Any], object]", function: "Callable[[], Any]") -> Any:
    """Calls ``function``, and ``hook`` for each call in it. The collector does not run, which calls finalizers of what others have left."""
    gc.collect()
    gc.disable()
    sys.setprofile(hook)
    try:
        return function()
    finally:
        sys.setprofile(None)
        gc.enable()


def used() -> "tuple[int, int]":
    """Returns the numbers of exports and leases of this process, which include those that other tests have left for later."""
    gc.collect()
    counters = device_ipc.counters()
    return counters["exports"], counters["leases"]


def wait_used(before: "tuple[int, int]") -> None:
    """Waits until there are no more exports and leases than before. They end on a thread of the library."""
    deadline = time.monotonic() + LIMIT
    while any(now > limit for now, limit in zip(used(), before, strict=True)):
        assert time.monotonic() < deadline, (used(), before)
        time.sleep(0.005)

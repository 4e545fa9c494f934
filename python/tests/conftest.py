"""All tests run on the mock, unless the environment names another backend."""

import os

os.environ.setdefault("DEVICE_IPC_BACKEND", "mock")
# With the kinds of memory of CUDA, so that what passes here passes there.
os.environ.setdefault("DEVICE_IPC_MOCK", "devices=2;like=cuda")

import faulthandler
import gc
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

import device_ipc

Start = Callable[..., "subprocess.Popen[str]"]

LIMIT = 120
"""Seconds in which what has ended is also gone, on a loaded machine."""

PRELUDE = """
import sys
import numpy as np
import device_ipc as d
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

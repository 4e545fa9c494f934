"""All tests run on the mock, unless the environment names another backend."""

import os

os.environ.setdefault("DEVICE_IPC_BACKEND", "mock")
os.environ.setdefault("DEVICE_IPC_MOCK", "devices=2")

import faulthandler
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

Start = Callable[..., "subprocess.Popen[str]"]

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

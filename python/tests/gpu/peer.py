"""A second process with PyTorch, which runs the programs that a test sends it."""

import json
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

LOOP = r"""
import contextlib, gc, io, json, os, sys, traceback
replies = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
space = {"__name__": "peer", "gc": gc, "os": os}
exec("import torch, device_ipc as d, device_ipc.torch as dt", space)
print(json.dumps({"result": os.getpid()}), file=replies)
for line in sys.stdin:
    request = json.loads(line)
    space.update(request["values"])
    space["result"] = None
    try:
        exec(compile(request["program"], "<peer>", "exec"), space)
        reply = {"result": space["result"]}
    except BaseException:
        reply = {"failed": traceback.format_exc()}
    print(json.dumps(reply), file=replies)
"""


class Peer:
    """A process that is killed at the end, and earlier where it does not answer."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DEVICE_IPC_BACKEND": "cuda", **environment},
        )
        self._replies: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._started = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def begin(self, program: str, **values: object) -> None:
        """Starts a program; its variables stay for the next one."""
        if not self._started:
            self.answer(120)
            self._started = True
        assert self.process.stdin is not None
        request = {"program": textwrap.dedent(program), "values": values}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = 60) -> Any:
        """Returns the value of `result` at the end of the program."""
        try:
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            pytest.fail(f"the other process has not answered within {timeout} s")
        if not line:
            pytest.fail(f"the other process has ended with status {self.process.wait(30)}")
        reply = json.loads(line)
        if "failed" in reply:
            pytest.fail("in the other process: " + reply["failed"])
        return reply["result"]

    def run(self, program: str, timeout: float = 60, **values: object) -> Any:
        """Runs a program and returns the value of `result` at the end of it."""
        self.begin(program, **values)
        return self.answer(timeout)

    def kill(self) -> None:
        """Kills the process and reaps it."""
        self.process.kill()
        self.process.wait(30)


def until(condition: Callable[[], bool], timeout: float = 30) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition does not hold"
        time.sleep(0.002)


def usage() -> tuple[int, int]:
    """Returns resident memory in KiB and the number of file descriptors."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmRSS"].split()[0]), len(os.listdir("/proc/self/fd"))

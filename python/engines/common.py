"""What the cases of all engines need."""

from __future__ import annotations

import contextlib
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from . import models
from .engine import Engine
from .suite import Skipped

Started = TypeVar("Started")

SLACK = 64 << 20
"""Device memory of kernels and libraries, which comes with the first use of each."""


def check(found: Any, expected: Any, what: str) -> None:
    """Fails with the first difference of two results."""
    if found == expected:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        first = f"{names[0]!r}: {found.get(names[0])} != {expected.get(names[0])}"
        raise AssertionError(f"{what}: {len(names)} of {len(expected)} differ, the first is {first}")
    raise AssertionError(f"{what}: {found} != {expected}")


def devices(count: int) -> None:
    import torch

    if torch.cuda.device_count() < count:
        raise Skipped(f"it needs {count} devices, and this machine has {torch.cuda.device_count()}")


def needs_memory(gibibytes: int) -> None:
    """Skips a case where the device has less free memory."""
    import torch

    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        raise Skipped(f"it needs {gibibytes} GiB of free device memory")


def filled(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    state = models.checkpoint(config, "cuda")
    models.fill(state, seed)
    return state


def gigabytes() -> float:
    """Returns the device memory in use, by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 1e9


@contextlib.contextmanager
def pooled(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A checkpoint in memory that one open shares."""
    import device_ipc.torch

    with device_ipc.torch.pool():
        state = models.checkpoint(config, "cuda")
    models.fill(state, 0)
    yield state


@contextlib.contextmanager
def kept(name: str) -> Iterator[None]:
    """Runs a keeper of processed weights in a process of its own."""
    command = [sys.executable, "-m", "device_ipc", "keep", "--empty", "--name", name]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout and name in process.stdout.readline(), "the keeper is not ready"
        yield
    finally:
        process.kill()
        process.wait()


def lines(folder: Path, name: str, part: str) -> list[str]:
    """Returns the ends of the lines of an engine's log that have a text, behind it."""
    log = (folder / f"{name}.log").read_text(errors="replace")
    return [line.split(part, 1)[1].strip() for line in log.split("\n") if part in line]


def with_one_copy(
    folder: Path, starts: Sequence[Callable[[str], contextlib.AbstractContextManager[Started]]], stack: contextlib.ExitStack
) -> tuple[list[Started], dict[str, Any]]:
    """Starts engines with their weights in place, one after the other; returns them, the device memory with each, and what their logs say."""
    engines: list[Started] = []
    found: dict[str, Any] = {"GB before": gigabytes()}
    for number, start in enumerate(starts):
        engines.append(stack.enter_context(start(f"engine{number}")))
        found[f"GB with {number + 1} engines"] = gigabytes()
        found[f"in place {number}"] = lines(folder, f"engine{number}", "in place in ")
    return engines, found


def milliseconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1000


def median_ms(function: Callable[[], object], count: int) -> float:
    import torch

    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        times.append(milliseconds(function))
    return statistics.median(times)


def follow_versions(
    state: dict[str, Any],
    count: int,
    send: Callable[[], None],
    engines: Sequence[Engine],
    followers: Sequence[Engine],
    follow: Callable[[Engine], None],
    ordinary: Engine,
) -> Any:
    """Publishes versions of the weights by ``send``, which also updates an ordinary engine; returns the tokens of the last one.

    Fails if followers change before they follow, and if engines differ from the ordinary one after that.
    """
    expected = None
    for step in range(1, count + 1):
        models.fill(state, step)
        before = [one.digests() for one in followers]
        send()
        check([one.digests() for one in followers], before, "checksums before the engines follow")
        for one in followers:
            follow(one)
        for one in engines:
            check(one.digests(), ordinary.digests(), f"checksums after update {step}")
        expected = ordinary.tokens()
        check([one.tokens() for one in engines], [expected] * len(engines), f"tokens after update {step}")
    return expected


def timed_versions(send: Callable[[], object], followers: Sequence[Engine], follow: Callable[[Engine], object]) -> dict[str, Any]:
    """Returns the times of publishing a version, and of following it, and the device memory after that."""
    sends, follows = [], []
    for number in range(11):
        sent = median_ms(send, 1)
        followed = [median_ms(functools.partial(follow, one), 1) for one in followers]
        if number >= 3:
            sends.append(sent)
            follows += followed
    return {
        "send ms": statistics.median(sends),
        "follow ms": statistics.median(follows),
        "follow, lowest and highest": [round(min(follows), 1), round(max(follows), 1)],
        "GB after updates": gigabytes(),
    }

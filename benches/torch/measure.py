"""Shared functions of the scripts: statistics, rows, and child processes with a deadline.

A user (or `run.py`) starts a script as supervisor, which does not require torch. It starts the same script as a worker in a
separate session, forwards the rows that the worker prints, and kills the whole session at the deadline. A missing row is
printed with the reason. The worker measures, with child processes of `torch.multiprocessing` (spawn).

A row is one JSON object on one line, and always has all of `KEYS`. Times are in nanoseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

KEYS = (
    "row",
    "side",
    "samples",
    "median",
    "p10",
    "p90",
    "bytes",
    "devices",
    "torch",
    "cuda",
    "driver",
    "details",
    "error",
)

WORKER = "--worker"


class Unavailable(Exception):
    """A requirement of the rows is missing on this machine; the text names it."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """Returns a percentile of the samples by linear interpolation."""
    if not samples:
        raise ValueError("a percentile requires samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is not a percentage")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(samples: Sequence[int]) -> dict[str, float | None]:
    """Returns median and spread; all None without samples."""
    if not samples:
        return {"median": None, "p10": None, "p90": None}
    return {
        "median": statistics.median(samples),
        "p10": percentile(samples, 10),
        "p90": percentile(samples, 90),
    }


def row(
    name: str,
    samples: Sequence[int],
    size: int,
    machine: dict[str, object] | None = None,
    details: dict[str, object] | None = None,
    error: str | None = None,
) -> dict[str, object]:
    """Returns a row with all `KEYS`."""
    machine = machine or {}
    return {
        "row": name,
        "side": "torch",
        "samples": list(samples),
        **summary(samples),
        "bytes": size,
        "devices": machine.get("devices", []),
        "torch": machine.get("torch"),
        "cuda": machine.get("cuda"),
        "driver": machine.get("driver"),
        "details": details or {},
        "error": error,
    }


def show(finished: dict[str, object]) -> None:
    """Prints a row and flushes it, so that it is not lost if the script hangs later."""
    print(json.dumps(finished), flush=True)


def parse_rows(lines: Iterable[str]) -> list[dict[str, object]]:
    """Returns the rows among lines that may also contain other output, such as warnings of a library."""
    rows = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "row" in value and "samples" in value:
            rows.append(value)
    return rows


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Returns the version of the NVIDIA kernel module, such as 580.159.04."""
    try:
        words = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    numbers = [word for word in words if word[0].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else None


def describe_machine(cards: int) -> dict[str, object]:
    """Returns names and versions for a row.

    Raises `Unavailable` if torch is missing or sees fewer devices than `cards`.
    """
    try:
        import torch
    except ImportError as error:
        raise Unavailable(
            f"PyTorch not found for {sys.executable} ({error}); install it, or use another Python interpreter"
        ) from error
    if not torch.cuda.is_available():
        raise Unavailable(
            f"PyTorch {torch.__version__} sees no CUDA device; it requires an NVIDIA driver and a build for CUDA"
        )
    seen = torch.cuda.device_count()
    if seen < cards:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r} may hide devices"
        raise Unavailable(f"this script requires {cards} devices, but PyTorch sees {seen}{hidden}")
    return {
        "devices": [torch.cuda.get_device_name(index) for index in range(cards)],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def start_card(index: int) -> None:
    """Initializes the device in this process, before the first tensor of another process arrives."""
    import torch

    torch.cuda.set_device(index)
    torch.empty(1, device=f"cuda:{index}")
    torch.cuda.synchronize(index)


def timed(work: Callable[[], object]) -> int:
    """Returns the time of a call in nanoseconds."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def supervise(command: Sequence[str], seconds: float, expected: Sequence[str]) -> list[dict[str, object]]:
    """Runs a worker and returns its rows, with an error row for each missing one.

    The session of the worker, with all its child processes, is killed at the deadline, after the worker exits, and if this
    process is interrupted.
    """
    # A file instead of a pipe, because a child process that outlives the worker would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        worker = subprocess.Popen(command, stdout=output, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            reason = wait(worker, seconds)
        finally:
            kill_session(worker)
        output.seek(0)
        rows = parse_rows(output.read().decode(errors="replace").splitlines())
    received = {each["row"] for each in rows}
    return rows + [row(name, [], 0, error=reason) for name in expected if name not in received]


def wait(worker: subprocess.Popen, seconds: float) -> str:
    """Waits for the worker, and returns the reason why a row may be missing."""
    try:
        status = worker.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not measured: timed out after {seconds:g} s"
    if status == 0:
        return "not measured: the worker exited without this row"
    if status < 0:
        return f"not measured: the worker was terminated by {signal.Signals(-status).name}"
    return f"not measured: the worker failed with status {status}; its error is printed above"


def kill_session(worker: subprocess.Popen) -> None:
    """Kills the session of the worker, and reaps the worker."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


def main(
    script: str,
    names: Sequence[str],
    cards: int,
    seconds: float,
    measure: Callable[[dict[str, object], bool], None],
) -> int:
    """Runs a script, whose function `measure(machine, quick)` prints the rows with these names."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, for a functional test only")
    parser.add_argument(
        "--deadline",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help="timeout of the worker (default: %(default)g)",
    )
    parser.add_argument(WORKER, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        try:
            machine = describe_machine(cards)
        except Unavailable as reason:
            for name in names:
                show(row(name, [], 0, error=f"not measured: {reason}"))
            return 0
        measure(machine, arguments.quick)
        return 0
    command = [sys.executable, script, WORKER] + (["--quick"] if arguments.quick else [])
    rows = supervise(command, arguments.deadline, names)
    for each in rows:
        show(each)
    missing = [each for each in rows if each["error"]]
    for each in missing:
        print(f"{each['row']}: {each['error']}", file=sys.stderr)
    return 1 if missing else 0

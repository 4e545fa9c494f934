"""What every script here shares: statistics, the rows they print, and children that cannot hang.

A script is started twice. What a person (or `run.py`) starts is the supervisor: it needs no torch, starts the same
script again as a worker in a session of its own, passes on the rows that the worker prints, and kills the whole session
at the deadline. A row that did not come is printed with the reason. The worker measures, with children of its own by
`torch.multiprocessing` (spawn).

A row is one JSON object on one line, and always has all of `KEYS`. Times are nanoseconds.
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
    """This machine lacks what the rows need; the text says what."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` of the samples do not exceed, between two of them by their distance."""
    if not samples:
        raise ValueError("a percentile of no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is no percentage")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(samples: Sequence[int]) -> dict[str, float | None]:
    """Median and spread; all None where nothing was measured."""
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
    """One row, with every key of `KEYS`."""
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
    """Prints a row, at once: what was measured before a hang counts."""
    print(json.dumps(finished), flush=True)


def parse_rows(lines: Iterable[str]) -> list[dict[str, object]]:
    """The rows among lines that may hold anything else, such as a library's warnings."""
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
    """The version of NVIDIA's kernel module, such as 580.159.04."""
    try:
        words = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    numbers = [word for word in words if word[0].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else None


def describe_machine(cards: int) -> dict[str, object]:
    """Names and versions for a row, where torch sees this many cards.

    Raises `Unavailable` where it does not, or where there is no torch.
    """
    try:
        import torch
    except ImportError as error:
        raise Unavailable(
            f"there is no PyTorch for {sys.executable} ({error}); install it, or start another python"
        ) from error
    if not torch.cuda.is_available():
        raise Unavailable(
            f"PyTorch {torch.__version__} sees no CUDA device here; it needs an NVIDIA driver, and a build for CUDA"
        )
    seen = torch.cuda.device_count()
    if seen < cards:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}, which may hide some"
        raise Unavailable(f"this needs {cards} cards, and PyTorch sees {seen}{hidden}")
    return {
        "devices": [torch.cuda.get_device_name(index) for index in range(cards)],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def start_card(index: int) -> None:
    """Makes the card ready in this process, before the first tensor of another process arrives."""
    import torch

    torch.cuda.set_device(index)
    torch.empty(1, device=f"cuda:{index}")
    torch.cuda.synchronize(index)


def timed(work: Callable[[], object]) -> int:
    """How long a call takes, in nanoseconds."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def supervise(command: Sequence[str], seconds: float, expected: Sequence[str]) -> list[dict[str, object]]:
    """Runs a worker, and gives its rows and one with an error for each that did not come.

    The worker and all its children are gone when this returns: they are killed as one session at the deadline, when the
    worker ends, and when this process is interrupted.
    """
    # A file and no pipe: a child that outlives the worker would hold a pipe open, and its end would not come.
    with tempfile.TemporaryFile() as output:
        worker = subprocess.Popen(command, stdout=output, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            reason = ended(worker, seconds)
        finally:
            kill_session(worker)
        output.seek(0)
        rows = parse_rows(output.read().decode(errors="replace").splitlines())
    came = {each["row"] for each in rows}
    return rows + [row(name, [], 0, error=reason) for name in expected if name not in came]


def ended(worker: subprocess.Popen, seconds: float) -> str:
    """Waits for the worker, and says why a row may be missing."""
    try:
        status = worker.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not measured: killed at its deadline of {seconds:g} s"
    if status == 0:
        return "not measured: the worker ended without this row"
    if status < 0:
        return f"not measured: the worker was ended by {signal.Signals(-status).name}"
    return f"not measured: the worker failed with status {status}; its error stands above"


def kill_session(worker: subprocess.Popen) -> None:
    """Kills what is left of the worker's session, and reaps the worker."""
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
    """The main function of a script: `measure(machine, quick)` prints the rows of these names."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it works, not how fast it is")
    parser.add_argument(
        "--deadline",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help="the worker is killed after this time (default: %(default)g)",
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

"""The cases by name, each in a process of its own with a deadline, and their results as one file and one table.

A case that fails, hangs or ends the device's context for its process stops no other. A case returns what it has measured, raises
``Skipped`` where the machine lacks something, and any other exception where it fails.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
MODULES = {"vllm": "engines.cases,engines.kv_cases", "sglang": "engines.sglang_cases"}
"""For each engine, the modules whose import registers the cases."""
MODULE = MODULES["vllm"]

VARIABLES = {
    # vLLM imports flashinfer otherwise, which is not carried.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "DEVICE_IPC_BACKEND": "cuda",
}


class Skipped(Exception):
    """A case that this machine cannot run; the text is the reason."""


@dataclass
class Case:
    """A case: ``function`` receives a folder for its files."""

    name: str
    text: str
    function: Callable[[Path], dict[str, Any] | None]
    deadline: float


@dataclass
class Result:
    """What came of a case."""

    name: str
    outcome: str
    """``passed``, ``failed``, ``skipped``, ``timed out``, or ``died``."""
    seconds: float = 0.0
    text: str = ""
    """The reason, of one that has not passed."""
    measured: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}


Function = TypeVar("Function", bound=Callable[..., "dict[str, Any] | None"])


def case(name: str, deadline: float = 300.0, **arguments: Any) -> Callable[[Function], Function]:
    """Registers a function as a case; ``arguments`` are passed to it. The first line of its documentation is the text of the case."""

    def register(function: Function) -> Function:
        text = (function.__doc__ or "").strip().partition("\n")[0]
        if name in CASES:
            raise ValueError(f"there are two cases {name!r}")
        CASES[name] = Case(name, text, lambda folder: function(folder, **arguments), deadline)
        return function

    return register


def select(patterns: Iterable[str]) -> list[Case]:
    """Returns the cases whose names match one of the patterns; all without patterns. Raises ``ValueError`` for one that matches none."""
    for module in MODULE.split(","):
        importlib.import_module(module)
    patterns = list(patterns)
    for pattern in patterns:
        if not fnmatch.filter(CASES, pattern):
            raise ValueError(f"no case matches {pattern!r}; the cases are {', '.join(CASES)}")
    return [one for one in CASES.values() if not patterns or any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)]


def environment(path: Iterable[Path], base: dict[str, str]) -> dict[str, str]:
    """Returns the environment of the cases. Variables that are set already stay as they are."""
    folders = [str(HERE.parent), *(str(one.resolve()) for one in path), base.get("PYTHONPATH", "")]
    return {**VARIABLES, **base, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def run_here(name: str, out: Path) -> None:
    """Runs one case, and writes its result to ``out``/result.json."""
    (one,) = select([name])
    begin = time.monotonic()
    try:
        result = Result(name, "passed", measured=one.function(out) or {})
    except Skipped as reason:
        result = Result(name, "skipped", text=str(reason))
    except BaseException as error:
        traceback.print_exc()
        result = Result(name, "failed", text=f"{type(error).__name__}: {error}")
    result.seconds = time.monotonic() - begin
    partial = out / "result.partial"
    partial.write_text(json.dumps(asdict(result)))
    partial.rename(out / "result.json")


def run_child(one: Case, out: Path, variables: dict[str, str], deadline: float) -> Result:
    """Runs one case in a process of its own, whose descendants end with it."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").unlink(missing_ok=True)
    variables = {**variables, "VLLM_CACHE_ROOT": str(out / "cache")}
    command = [sys.executable, "-m", "engines", "case", one.name, "--cases", MODULE, "--out", str(out.resolve())]
    begin = time.monotonic()
    with (out / "log").open("wb") as log:
        # Not in its own folder: PYTHONPATH has this package.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True)
        ended = True
        try:
            process.wait(deadline)
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if (out / "result.json").exists():
        return Result(**json.loads((out / "result.json").read_text()))
    seconds = time.monotonic() - begin
    if ended:
        return Result(one.name, "died", seconds, f"the process ended with {process.returncode}; see {out / 'log'}")
    return Result(one.name, "timed out", seconds, f"no result after {deadline:.0f} s; see {out / 'log'}")


def run(cases: list[Case], out: Path, variables: dict[str, str], deadline: float | None = None) -> int:
    """Runs cases one after the other; writes results.json and table.md after each. Returns 0 if none has failed, else 1."""
    results: list[Result] = []
    for one in cases:
        print(f"{one.name} ...", end=" ", flush=True)
        results.append(run_child(one, out / one.name, variables, deadline or one.deadline))
        print(f"{results[-1].outcome} in {results[-1].seconds:.1f} s {results[-1].text}", flush=True)
        (out / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
        (out / "table.md").write_text(table(results))
    print(table(results))
    return 0 if all(result.outcome in ("passed", "skipped") for result in results) else 1


def table(results: list[Result]) -> str:
    """Returns results as a table of Markdown."""
    lines = ["| case | outcome | s | measured, or the reason |", "|---|---|---|---|"]
    for one in results:
        found = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in one.measured.items())
        text = (one.text or found).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {one.name} | {one.outcome} | {one.seconds:.1f} | {text[:300]} |")
    return "\n".join(lines) + "\n"

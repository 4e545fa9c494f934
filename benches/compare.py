"""Measures the same operations with device-ipc and PyTorch on this machine, and prints one Markdown table.

    cargo build --release -p device-ipc-bench
    python3 benches/compare.py [--quick] [--program PATH] [--python PATH] [--output FILE]

Without PyTorch or a GPU, the table contains the reason. `--ours FILE` and `--torch FILE` read existing results of
`device-ipc-bench --json FILE` and `benches/torch/run.py --output FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Schema version of the report that `device-ipc-bench --json` writes.
SCHEMA = 1
PROGRAM_VARIABLE = "DEVICE_IPC_BENCH_BIN"
# Both sides have timeouts per row; these are for a process that hangs nevertheless.
PROGRAM_SECONDS = 1800
TORCH_SECONDS = 1200


@dataclass(frozen=True)
class Pair:
    """A row of the table: a line of our report and a row of PyTorch that measure the same operation."""

    title: str
    row: str
    case: str
    torch: str
    # Target: how many times faster device-ipc is.
    goal: float | None


# Only PyTorch's transport is compared, not the whole rounds of the tutorial, whose layers are equal on both sides.
PAIRS = (
    Pair(
        "a tensor handed over and acknowledged, over a bare socket, both sides sleep",
        "hand-over",
        "an export that the receiver knows",
        "one_tensor_queue",
        30,
    ),
    Pair(
        "the same, shared anew each time",
        "hand-over",
        "shared anew each time, in memory that the receiver has open",
        "one_tensor_queue",
        30,
    ),
    Pair(
        "the same through a channel, both sides spin",
        "hand-over",
        "through a channel, an export that the receiver knows, both spin",
        "one_tensor_queue",
        30,
    ),
    Pair(
        "through a channel, shared anew each time, both sides spin",
        "hand-over",
        "through a channel, shared anew each time, both spin",
        "one_tensor_queue",
        30,
    ),
    Pair("the same through a ring, the receiver spins", "ring", "a spinning receiver", "one_tensor_queue", 100),
    Pair("1000 tensors of 64 B, first time", "state-dict", "64 B each, first time", "state_dict_64_first", 40),
    Pair("the same again", "state-dict", "64 B each, again", "state_dict_64_again", 100),
    Pair("1000 tensors of 1 MiB, first time", "state-dict", "1 MiB each, first time", "state_dict_1mib_first", 40),
    Pair("the same again", "state-dict", "1 MiB each, again", "state_dict_1mib_again", 100),
    Pair("ten rounds over two cards, 4 MB each way: CUDA RPC", "device-map", "ten rounds", "rpc_transport_cuda", 2),
    Pair("the same rounds: RPC through the CPU", "device-map", "ten rounds", "rpc_transport_cpu", 34),
)


class Failed(Exception):
    """One side has no result; the text contains the reason."""


def lines_of(document: object) -> dict[tuple[str, str], dict[str, object]]:
    """Returns the measurements of our report by row and case.

    Raises `Failed` for an invalid report.
    """
    lines = document.get("lines") if isinstance(document, dict) else None
    if not isinstance(lines, list):
        raise Failed("invalid report of device-ipc-bench: no list 'lines'; use the version of this checkout")
    if document.get("schema") != SCHEMA:
        found = document.get("schema")
        raise Failed(f"the report of device-ipc-bench has schema {found}, but this script supports {SCHEMA}; use the version of this checkout")
    return {(line["row"], line["case"]): line for line in lines}


def not_judged(report: dict[str, object], rows: Sequence[dict[str, object]]) -> str | None:
    """Returns why the two sides cannot be compared, or None."""
    machine = report.get("machine") or {}
    if not machine.get("hardware"):
        return f"device-ipc ran on {machine.get('backend')}, which is not hardware"
    if not machine.get("optimised"):
        return "device-ipc was built without --release"
    drivers = {row["driver"] for row in rows if row["median"] and row["driver"]}
    if any(driver not in str(machine.get("driver")) for driver in drivers):
        return f"device-ipc ran with {machine.get('driver')}, but PyTorch with {' and '.join(sorted(drivers))}"
    return None


def joined(
    lines: dict[tuple[str, str], dict[str, object]],
    rows: Sequence[dict[str, object]],
    pairs: Sequence[Pair],
    judged: bool = True,
) -> list[dict[str, object]]:
    """Returns both sides of each pair, the ratio of the medians, and the reason for a missing side."""
    by_name = {row["row"]: row for row in rows}
    table = []
    for pair in pairs:
        line, row = lines.get((pair.row, pair.case)), by_name.get(pair.torch)
        ours = line.get("ours") if line else None
        theirs = row if row and row["median"] else None
        missing = []
        if line is None:
            missing.append("device-ipc: not in the report")
        elif not ours:
            missing.append(f"device-ipc: {line.get('skipped') or 'not measured'}")
        if row is None:
            missing.append("PyTorch: no such row")
        elif not theirs:
            missing.append(f"PyTorch: {row['error'] or 'not measured'}")
        times = theirs["median"] / ours["median"] if ours and theirs and ours["median"] else None
        table.append(
            {
                "title": pair.title,
                "ours": ours,
                "torch": theirs,
                "times": times,
                "goal": pair.goal,
                "reached": times >= pair.goal if judged and times is not None and pair.goal is not None else None,
                "missing": "; ".join(missing),
            }
        )
    return table


def alone(rows: Sequence[dict[str, object]], pairs: Sequence[Pair]) -> list[dict[str, object]]:
    """Returns the rows of PyTorch without a counterpart."""
    paired = {pair.torch for pair in pairs}
    return [row for row in rows if row["row"] not in paired]


def time_text(nanoseconds: float) -> str:
    """Formats a time with three digits and its unit."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= factor:
            return f"{significant(nanoseconds / factor)} {unit}"
    return f"{significant(nanoseconds)} ns"


def significant(value: float) -> str:
    """Formats a number with three digits and at most two decimal places."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def spread(side: dict[str, object] | None) -> str:
    if not side:
        return "–"
    return f"{time_text(side['median'])} ({time_text(side['p10'])} – {time_text(side['p90'])})"


def markdown(
    table: Sequence[dict[str, object]], machine: Sequence[str], others: Sequence[dict[str, object]] = ()
) -> str:
    """Returns the machine, the table, the other rows of PyTorch, and the missing sides, as Markdown."""
    text = [*machine, ""] if machine else []
    text += [
        "Medians, with the 10th and 90th percentile of the rounds. Times faster: PyTorch's median divided by ours.",
        "",
        "| operation | device-ipc | PyTorch | times faster | target |",
        "|---|---|---|---|---|",
    ]
    for entry in table:
        times = "–" if entry["times"] is None else significant(entry["times"])
        goal = "" if entry["goal"] is None else f"{entry['goal']:g}"
        verdict = {None: "", True: ": reached", False: ": **not reached**"}[entry["reached"]]
        text.append(
            f"| {entry['title']} | {spread(entry['ours'])} | {spread(entry['torch'])} | {times} | {goal}{verdict} |"
        )
    if others:
        text += ["", "Other rows of PyTorch:", "", "| row | PyTorch |", "|---|---|"]
        text += [f"| {row['row']} | {spread(row) if row['median'] else row['error']} |" for row in others]
    missing = [f"- {entry['title']}: {entry['missing']}" for entry in table if entry["missing"]]
    if missing:
        text += ["", "Not compared:", "", *missing]
    return "\n".join(text) + "\n"


def machines_of(report: dict[str, object], rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns a description of the machine of each side that has results."""
    machine = report.get("machine") or {}
    text = []
    if machine:
        text.append(
            f"- device-ipc {machine.get('version')} at {machine.get('commit')}, {machine.get('date')}: "
            f"{machine.get('backend')} ({machine.get('driver')}), {' and '.join(machine.get('devices') or [])}"
        )
    measured = [row for row in rows if row["devices"]]
    if measured:
        cards, first = max((row["devices"] for row in measured), key=len), measured[0]
        text.append(
            f"- PyTorch {first['torch']} (CUDA {first['cuda']}): driver {first['driver']}, {' and '.join(cards)}"
        )
    return text


def program_path(given: str | None) -> Path:
    """Returns the path of the program: the option, the variable, or the target directory of Cargo."""
    if given:
        return Path(given)
    if variable := os.environ.get(PROGRAM_VARIABLE):
        return Path(variable)
    target = Path(os.environ.get("CARGO_TARGET_DIR", FOLDER.parent / "target"))
    return target / "release" / "device-ipc-bench"


def run_ours(program: Path, backend: str | None, extra: Sequence[str]) -> object:
    """Runs the program and returns its report. Its progress goes to standard error."""
    if not program.is_file():
        raise Failed(
            f"{program} not found: run cargo build --release -p device-ipc-bench, or set its path by --program or "
            f"{PROGRAM_VARIABLE}"
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(program), "--json", str(report), *extra]
        if backend:
            command += ["--backend", backend]
        try:
            done = subprocess.run(command, stdout=sys.stderr, timeout=PROGRAM_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"device-ipc-bench timed out after {PROGRAM_SECONDS} s") from error
        if not report.is_file():
            raise Failed(f"device-ipc-bench wrote no report (status {done.returncode}); its error is printed above")
        return json.loads(report.read_text())


def run_torch(python: str, quick: bool) -> list[dict[str, object]]:
    """Runs the PyTorch scripts and returns their rows."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.jsonl"
        command = [python, str(FOLDER / "torch" / "run.py"), "--output", str(output)]
        command += ["--quick"] if quick else []
        try:
            # Status 1 means that rows are missing; each row contains the reason.
            subprocess.run(command, stdout=subprocess.DEVNULL, timeout=TORCH_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"benches/torch/run.py timed out after {TORCH_SECONDS} s") from error
        except OSError as error:
            raise Failed(f"cannot start {python}: {error}") from error
        if not output.is_file():
            raise Failed("benches/torch/run.py wrote no rows; its error is printed above")
        return rows_of(output.read_text())


def rows_of(text: str) -> list[dict[str, object]]:
    """Parses the rows in the output of `run.py`."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds, for a functional test only")
    add("--program", metavar="PATH", help=f"the program (default: ${PROGRAM_VARIABLE}, else target/release/device-ipc-bench)")
    add("--backend", default="cuda", metavar="NAME", help="our backend (default: %(default)s)")
    add("--python", default=sys.executable, metavar="PATH", help="a Python interpreter with PyTorch")
    add("--ours", type=Path, metavar="FILE", help="read our report instead of measuring")
    add("--torch", type=Path, metavar="FILE", help="read the rows of PyTorch instead of measuring")
    add("--output", type=Path, metavar="FILE", help="also write the table to this file")
    add("arguments", nargs="*", help="after --: additional arguments for device-ipc-bench")
    arguments = parser.parse_args()
    try:
        if arguments.ours:
            report = json.loads(arguments.ours.read_text())
        else:
            report = run_ours(program_path(arguments.program), arguments.backend, arguments.arguments)
        lines = lines_of(report)
        if arguments.torch:
            rows = rows_of(arguments.torch.read_text())
        else:
            rows = run_torch(arguments.python, arguments.quick)
    except (Failed, OSError, ValueError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    reason = not_judged(report, rows)
    head = machines_of(report, rows)
    if reason:
        head.append(f"- **Not judged**: {reason}.")
    text = markdown(joined(lines, rows, PAIRS, reason is None), head, alone(rows, PAIRS))
    print(text, end="")
    if arguments.output:
        arguments.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

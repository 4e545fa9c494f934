"""Runs all PyTorch measurements of this directory, and prints their rows as one JSON object per line.

    python3 benches/torch/run.py [--quick] [--output FILE] [--python PATH]

Exits with 1 if a row was not measured; the row contains the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import measure

FOLDER = Path(__file__).resolve().parent
# Scripts and their timeouts in seconds.
SCRIPTS = (("one_tensor", 300), ("state_dict", 300), ("events", 120), ("rpc_rounds", 300))


def run_script(python: str, script: str, quick: bool, seconds: float) -> list[dict[str, object]]:
    """Runs one script and returns its rows."""
    names = importlib.import_module(script).ROWS
    command = [python, str(FOLDER / f"{script}.py"), measure.WORKER] + (["--quick"] if quick else [])
    return measure.supervise(command, seconds, names)


def run_all(python: str, quick: bool) -> list[dict[str, object]]:
    """Runs all scripts and returns their rows; prints progress to standard error."""
    rows = []
    for script, seconds in SCRIPTS:
        print(f"{script} (at most {seconds} s)", file=sys.stderr, flush=True)
        rows += run_script(python, script, quick, seconds)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, for a functional test only")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="a Python interpreter with PyTorch")
    arguments = parser.parse_args()
    rows = run_all(arguments.python, arguments.quick)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    print(lines, end="")
    if arguments.output:
        arguments.output.write_text(lines)
    missing = [row for row in rows if row["error"]]
    for row in missing:
        print(f"{row['row']}: {row['error']}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

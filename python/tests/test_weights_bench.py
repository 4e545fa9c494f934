"""benches/weights.py on the mock: what it reports, not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

BENCH = Path(__file__).parents[1] / "benches/weights.py"
SMALL = ["--backend", "mock", "--quick", "--bytes", "4e6", "--buffer-mib", "1", "--bucket-mib", "1"]


def run(folder: Path, *arguments: str) -> "tuple[int, list[Any], str]":
    """Returns the exit status, the rows and the tables."""
    files = ["--json", str(folder / "rows.json"), "--output", str(folder / "tables.md")]
    command = [sys.executable, str(BENCH), *SMALL, *files, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    rows = [json.loads(line) for line in (folder / "rows.json").read_text().splitlines()]
    table = (folder / "tables.md").read_text()
    assert done.stdout == table, done.stderr
    return done.returncode, rows, table


def test_updates_are_compared_with_a_copy_and_with_the_framework(tmp_path: Path) -> None:
    sides = ["copy", "vllm", "ours-buckets"]
    status, rows, table = run(tmp_path, *(f"--side={side}" for side in sides))
    assert status == 0, rows
    assert [row["row"] for row in rows] == sides
    for row in rows[1:]:
        assert len(row["samples_ms"]) == 3 and min(row["samples_ms"]) > 0 and 3e6 < row["bytes"] < 6e6
    (line,) = [line for line in table.splitlines() if line.startswith("| ours-buckets ")]
    assert line.endswith(" × vllm |")


def test_keeper_without_program_and_sides_without_time_are_reported(tmp_path: Path) -> None:
    status, rows, _table = run(tmp_path, "--side=keeper", "--keeper=/nonexistent", "--limit=60")
    assert status == 1 and rows[0]["skipped"] == "/nonexistent not found"
    status, rows, table = run(tmp_path, "--side=verl", "--time-limit=1")
    assert status == 1 and rows[1]["skipped"] == "no time is left for it" and "verl: no time is left for it" in table


def test_side_that_does_not_finish_is_killed(tmp_path: Path) -> None:
    status, rows, _table = run(tmp_path, "--side=vllm", "--limit=0.5")
    assert status == 1 and rows[0]["skipped"] == "not finished after 0.5 s"

"""Tests of compare.py: python3 -m unittest discover benches"""

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import compare
from compare import Failed, Pair

PAIR = Pair("one tensor", "hand_over", "one way", "one_tensor_queue", 30.0)


def side(median):
    return {"median": median, "p10": median * 0.9, "p90": median * 1.5, "samples": 9}


def line(ours, **more):
    return {"row": "hand_over", "case": "one way", "ours": ours, **more}


def row(median, error=None, devices=()):
    more = {"torch": "2.11.0", "cuda": "13.0", "driver": "580.159.04", "devices": list(devices), "error": error}
    spread = {"median": median, "p10": median and median * 0.5, "p90": median and median * 2}
    return {"row": "one_tensor_queue", "side": "torch", "samples": [], "bytes": 80, "details": {}, **spread, **more}


class Joining(unittest.TestCase):
    def entry(self, lines, rows):
        [entry] = compare.joined(compare.lines_of({"schema": 1, "lines": lines}), rows, [PAIR])
        return entry

    def test_ratio_of_medians_is_judged_by_goal(self):
        entry = self.entry([line(side(4_000.0))], [row(121_000.0)])
        self.assertEqual((entry["times"], entry["reached"], entry["missing"]), (30.25, True, ""))
        self.assertIs(self.entry([line(side(4_100.0))], [row(121_000.0)])["reached"], False)

    def test_missing_side_has_reason_and_no_verdict(self):
        for lines, rows, reason in (
            ([], [row(1.0)], "device-ipc: not in the report"),
            ([line(None, skipped="there is one card")], [row(1.0)], "device-ipc: there is one card"),
            ([line(None)], [row(1.0)], "device-ipc: not measured"),
            ([line(side(1.0))], [], "PyTorch: no such row"),
            ([line(side(1.0))], [row(None, error="killed at its deadline")], "PyTorch: killed at its deadline"),
        ):
            with self.subTest(reason):
                entry = self.entry(lines, rows)
                self.assertEqual((entry["times"], entry["reached"], entry["missing"]), (None, None, reason))

    def test_two_missing_sides_have_reasons(self):
        missing = self.entry([], [])["missing"]
        self.assertEqual(missing, "device-ipc: not in the report; PyTorch: no such row")

    def test_invalid_report_is_rejected(self):
        for document in ({}, [], {"lines": 3}, None):
            with self.assertRaisesRegex(Failed, "no list 'lines'"):
                compare.lines_of(document)

    def test_other_schema_is_rejected(self):
        with self.assertRaisesRegex(Failed, "schema 2, but this script supports 1"):
            compare.lines_of({"schema": 2, "lines": []})

    def test_rows_without_counterpart_are_listed(self):
        others = [{**row(1_000.0), "row": "event_export"}, {**row(None, error="no card"), "row": "other"}]
        found = compare.alone([row(1.0), *others], [PAIR])
        self.assertEqual([each["row"] for each in found], ["event_export", "other"])
        text = compare.markdown([], [], found)
        self.assertIn("| event_export | 1.00 µs (500 ns – 2.00 µs) |\n| other | no card |", text)

    def test_different_machines_are_not_judged(self):
        machine = {"hardware": True, "optimised": True, "backend": "cuda", "driver": "driver 580.159.04, CUDA 13.0"}

        def reason(**changed):
            return compare.not_judged({"machine": {**machine, **changed}}, [row(1.0)])

        self.assertIsNone(reason())
        self.assertIn("not hardware", reason(hardware=False, backend="mock"))
        self.assertIn("--release", reason(optimised=False))
        self.assertIn("PyTorch with 580.159.04", reason(driver="driver 570.1, CUDA 12.8"))
        lines = compare.lines_of({"schema": 1, "lines": [line(side(4_000.0))]})
        [entry] = compare.joined(lines, [row(121_000.0)], [PAIR], judged=False)
        self.assertEqual((entry["times"], entry["reached"]), (30.25, None))

    def test_pairs_are_unique(self):
        ours = [(pair.row, pair.case, pair.torch) for pair in compare.PAIRS]
        self.assertEqual(len(ours), len(set(ours)))

    def test_pairs_refer_to_existing_rows(self):
        sys.path.insert(0, str(compare.FOLDER / "torch"))
        try:
            import run

            known = {name for script, _ in run.SCRIPTS for name in __import__(script).ROWS}
        finally:
            sys.path.pop(0)
        self.assertLessEqual({pair.torch for pair in compare.PAIRS}, known)


class Table(unittest.TestCase):
    def test_table_row_has_spread_and_verdict(self):
        entries = compare.joined({("hand_over", "one way"): line(side(4_000.0))}, [row(121_000.0)], [PAIR])
        text = compare.markdown(entries, ["NVIDIA H200"])
        expected = (
            "| one tensor | 4.00 µs (3.60 µs – 6.00 µs) | 121 µs (60.5 µs – 242 µs) | 30.2 | 30: reached |"
        )
        self.assertIn(expected, text)
        self.assertTrue(text.startswith("NVIDIA H200\n\n"))
        self.assertNotIn("Not compared", text)

    def test_missing_sides_are_listed_below_the_table(self):
        text = compare.markdown(compare.joined({}, [], [PAIR]), [])
        self.assertIn("| one tensor | – | – | – | 30 |", text)
        self.assertIn("Not compared:\n\n- one tensor: device-ipc: not in the report; PyTorch: no such row\n", text)

    def test_times_have_three_digits_and_unit(self):
        cases = {0.4: "0.40 ns", 104.6: "105 ns", 1_500: "1.50 µs", 38_000_000: "38.0 ms", 2.3145e9: "2.31 s"}
        for nanoseconds, text in cases.items():
            self.assertEqual(compare.time_text(nanoseconds), text)

    def test_machine_is_taken_from_a_measured_row(self):
        self.assertEqual(compare.machines_of({}, [row(None, error="no")]), [])
        [text] = compare.machines_of({}, [row(1.0, devices=["H200"]), row(1.0, devices=["H200", "H200"])])
        self.assertEqual(text, "- PyTorch 2.11.0 (CUDA 13.0): driver 580.159.04, H200 and H200")
        machine = {"version": "0.1.0", "commit": "abc", "date": "today", "backend": "mock", "driver": "engine 1"}
        [text] = compare.machines_of({"machine": {**machine, "devices": ["Mock"]}}, [])
        self.assertEqual(text, "- device-ipc 0.1.0 at abc, today: mock (engine 1), Mock")


class Program(unittest.TestCase):
    def test_program_path_precedence(self):
        with mock.patch.dict(os.environ, {"DEVICE_IPC_BENCH_BIN": "/from/variable", "CARGO_TARGET_DIR": "/target"}):
            self.assertEqual(compare.program_path("/option"), Path("/option"))
            self.assertEqual(compare.program_path(None), Path("/from/variable"))
            del os.environ["DEVICE_IPC_BENCH_BIN"]
            self.assertEqual(compare.program_path(None), Path("/target/release/device-ipc-bench"))

    def test_missing_program_error_names_the_build_command(self):
        with self.assertRaisesRegex(Failed, "cargo build --release -p device-ipc-bench"):
            compare.run_ours(Path("/nowhere/device-ipc-bench"), "cuda", [])

    def test_run_ours_passes_arguments_and_reads_report(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "device-ipc-bench"
            program.write_text('#!/bin/sh\nprintf \'{"lines": [], "said": "%s"}\' "$3 $4 $5" > "$2"\n')
            program.chmod(0o755)
            report = compare.run_ours(program, "cuda", ["--rounds=3"])
        self.assertEqual(report, {"lines": [], "said": "--rounds=3 --backend cuda"})

    def test_failed_program_error_has_its_status(self):
        with self.assertRaisesRegex(Failed, "status 1"):
            compare.run_ours(Path("/bin/false"), None, [])

    def test_rows_are_parsed_line_by_line(self):
        self.assertEqual(compare.rows_of(json.dumps(row(1.0)) + "\n\n"), [row(1.0)])


if __name__ == "__main__":
    unittest.main()

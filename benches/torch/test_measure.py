"""What can be tested without PyTorch: python3 -m unittest discover benches/torch"""

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import measure
import run
import state_dict


def worker(code):
    """A command that runs this code as a worker would run."""
    return [sys.executable, "-c", code]


SHOW = "import json; print(json.dumps({'row': '%s', 'samples': [1], 'error': None}), flush=True); "


def is_gone(pid):
    try:
        # A zombie has exited too.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


class Statistics(unittest.TestCase):
    def test_summary_has_median_and_percentiles(self):
        self.assertEqual(measure.summary(list(range(100, -1, -1))), {"median": 50, "p10": 10, "p90": 90})

    def test_percentile_interpolates(self):
        self.assertEqual(measure.percentile([0, 100], 10), 10)
        self.assertEqual(measure.percentile([7], 90), 7)

    def test_no_samples_have_no_summary(self):
        self.assertEqual(measure.summary([]), {"median": None, "p10": None, "p90": None})
        with self.assertRaises(ValueError):
            measure.percentile([], 50)
        with self.assertRaises(ValueError):
            measure.percentile([1], 101)


class Rows(unittest.TestCase):
    def test_row_has_all_keys(self):
        machine = {"devices": ["H200"], "torch": "2.11.0", "cuda": "13.0", "driver": "580.1"}
        measured = measure.row("a", [3, 1, 2], 80, machine, {"tensors": 1})
        self.assertEqual(tuple(measured), measure.KEYS)
        self.assertEqual((measured["median"], measured["driver"], measured["error"]), (2, "580.1", None))
        self.assertEqual(tuple(measure.row("a", [], 0, error="why")), measure.KEYS)

    def test_parse_rows_skips_other_lines(self):
        lines = ["warning: {", '{"other": 1}', "[1]", json.dumps(measure.row("a", [1], 0)), ""]
        self.assertEqual([row["row"] for row in measure.parse_rows(lines)], ["a"])

    def test_row_names_are_unique(self):
        names = [name for script, _ in run.SCRIPTS for name in __import__(script).ROWS]
        self.assertEqual(len(names), len(set(names)))


class Supervision(unittest.TestCase):
    def errors(self, code, seconds=60.0, expected=("a", "b")):
        return {row["row"]: row["error"] for row in measure.supervise(worker(code), seconds, expected)}

    def test_missing_rows_have_an_error(self):
        errors = self.errors(SHOW % "a")
        self.assertIsNone(errors["a"])
        self.assertIn("exited without this row", errors["b"])

    def test_hanging_worker_is_killed_and_its_rows_are_kept(self):
        begun = time.monotonic()
        errors = self.errors(SHOW % "a" + "import time; time.sleep(600)", seconds=2)
        self.assertLess(time.monotonic() - begun, 60)
        self.assertIsNone(errors["a"])
        self.assertIn("timed out after 2 s", errors["b"])

    def test_orphaned_child_is_killed(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pid"
            child = "import time; time.sleep(100)"
            code = (
                f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
                f"open({str(file)!r}, 'w').write(str(child.pid))"
            )
            self.errors(code)
            pid = int(file.read_text())
            deadline = time.monotonic() + 30
            while not is_gone(pid):
                self.assertLess(time.monotonic(), deadline, "the child process is alive")
                os.sched_yield()

    def test_worker_failure_has_status_or_signal(self):
        self.assertIn("status 3", self.errors("raise SystemExit(3)")["a"])
        self.assertIn("SIGKILL", self.errors("import os; os.kill(os.getpid(), 9)")["a"])

    def test_missing_torch_is_reported_in_every_row(self):
        with mock.patch.dict(sys.modules, {"torch": None}):
            with self.assertRaisesRegex(measure.Unavailable, "PyTorch not found"):
                measure.describe_machine(1)


class Machines(unittest.TestCase):
    def torch(self, cards):
        torch = mock.MagicMock(__version__="2.11.0")
        torch.cuda.is_available.return_value = cards > 0
        torch.cuda.device_count.return_value = cards
        torch.cuda.get_device_name.side_effect = "card {}".format
        return mock.patch.dict(sys.modules, {"torch": torch})

    def test_too_few_devices_error_names_the_variable(self):
        with self.torch(1), mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}):
            seen = "requires 2 devices, but PyTorch sees 1; CUDA_VISIBLE_DEVICES='0'"
            with self.assertRaisesRegex(measure.Unavailable, seen):
                measure.describe_machine(2)

    def test_no_device_is_unavailable(self):
        with self.torch(0), self.assertRaisesRegex(measure.Unavailable, "sees no CUDA device"):
            measure.describe_machine(1)

    def test_machine_lists_devices(self):
        with self.torch(2):
            self.assertEqual(measure.describe_machine(2)["devices"], ["card 0", "card 1"])

    def test_driver_version_is_parsed(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "version"
            self.assertIsNone(measure.driver_version(file))
            file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n")
            self.assertEqual(measure.driver_version(file), "580.159.04")
            file.write_text("")
            self.assertIsNone(measure.driver_version(file))


class Allocations(unittest.TestCase):
    def test_allocations_with_tensors_are_counted_once(self):
        segments = [{"address": 0x1000, "total_size": 0x1000}, {"address": 0x4000, "total_size": 0x2000}]
        found = state_dict.allocations_of([0x1000, 0x1FFF, 0x5000], segments)
        self.assertEqual(found, {"allocations": 2, "smallest": 0x1000, "largest": 0x2000})
        self.assertEqual(state_dict.allocations_of([0x2000], segments)["allocations"], 0)


class Scripts(unittest.TestCase):
    def test_unavailable_script_prints_rows_and_fails(self):
        with mock.patch.object(sys, "argv", ["one_tensor.py", "--deadline", "30"]):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                with mock.patch.object(measure, "supervise", return_value=[measure.row("a", [], 0, error="why")]):
                    status = measure.main("one_tensor.py", ["a"], 1, 60, lambda machine, quick: None)
        self.assertEqual(status, 1)
        self.assertEqual(measure.parse_rows(printed.getvalue().splitlines())[0]["error"], "why")


if __name__ == "__main__":
    unittest.main()

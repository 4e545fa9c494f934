"""The filling of blocks: python3 -m unittest discover docs/seeds"""

import unittest
from unittest import mock

import refresh
from refresh import Failed

PAGE = """Before
<!-- output: mock: say hello -->
```text
old
```
Between
<!-- output: gpu: say more -->
```text
(not yet run)
```
"""


class Filling(unittest.TestCase):
    def test_blocks_of_the_machines_are_filled_and_all_else_stays(self):
        page, failures = refresh.refreshed(PAGE, ["mock"], lambda machine, command: f"{machine} {command}\n")
        self.assertEqual(failures, [])
        self.assertEqual(page, PAGE.replace("old\n", "mock say hello\n"))

    def test_a_command_that_fails_changes_nothing_and_is_named(self):
        def run_on(machine, command):
            raise Failed("status 3")

        page, failures = refresh.refreshed(PAGE, ["mock", "gpu"], run_on)
        self.assertEqual(page, PAGE)
        self.assertEqual(failures, ["mock: say hello: status 3", "gpu: say more: status 3"])

    def test_a_machine_that_nobody_knows_is_a_failure(self):
        page = PAGE.replace("mock:", "mok:")
        self.assertIn("no such machine", refresh.refreshed(page, ["mock"], None)[1][0])

    def test_what_differs_from_run_to_run_is_not_compared(self):
        page = PAGE.replace("old\n", "pid=12 at 127.0.0.1:5001 after 3.5 ms\nmean=1.5\n")
        same = PAGE.replace("old\n", "mean=1.5\npid=7 at 127.0.0.1:61234 after 12 ms\n")
        self.assertEqual(refresh.stale(page, same), [])
        for other in ("mean=2.5\npid=7 at 127.0.0.1:61234 after 12 ms\n", "mean=1.5\n"):
            self.assertIn("it now prints", refresh.stale(page, PAGE.replace("old\n", other))[0])

    def test_every_page_has_a_block_for_each_machine(self):
        for path in refresh.PAGES.glob("00*.md"):
            machines = {block["machine"] for block in refresh.BLOCK.finditer(path.read_text())}
            self.assertEqual(machines, set(refresh.MACHINES), path.name)
            self.assertEqual(path.read_text().count("<!-- output:"), len(refresh.BLOCK.findall(path.read_text())))


class Running(unittest.TestCase):
    def test_the_standard_output_of_a_command(self):
        self.assertEqual(refresh.run("echo a > f; cat f; echo b >&2", {"PATH": "/usr/bin:/bin"}), "a\n")

    def test_a_command_that_fails_in_the_middle_fails(self):
        with self.assertRaisesRegex(Failed, "status 1"):
            refresh.run("false; echo b", {"PATH": "/usr/bin:/bin"})

    def test_a_command_that_hangs_is_killed_with_what_it_started(self):
        with mock.patch.object(refresh, "SECONDS", 1), self.assertRaisesRegex(Failed, "did not end within 1 s"):
            refresh.run("sleep 100 & sleep 100", {"PATH": "/usr/bin:/bin"})

    def test_variables_of_ours_do_not_leak_into_a_command(self):
        with mock.patch.dict("os.environ", {"DEVICE_IPC_MOCK": "devices=9"}):
            self.assertNotIn("DEVICE_IPC_MOCK", refresh.environment("mock", refresh.PAGES))


if __name__ == "__main__":
    unittest.main()

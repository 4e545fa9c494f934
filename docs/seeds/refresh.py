"""Fills the output blocks of these pages by running their commands.

    cargo build -p device-ipc-cli -p device-ipc -p device-ipc-sim-ascendcl --lib --bins --examples
    python3 docs/seeds/refresh.py                    # the mock and the simulated Ascend machine
    python3 docs/seeds/refresh.py --machine gpu      # on a machine with GPUs
    cargo xtask python --seeds                       # the Python programs, with the package
    python3 docs/seeds/refresh.py --check            # fail where a command fails or says something else; change nothing

A block is a comment, `<!-- output: MACHINE: COMMAND -->`, and the fenced text behind it. The command is run by bash in an empty
folder; its standard output becomes the text. A command that fails, or takes longer than two minutes, changes nothing.

The machine `python` is the mock with the Python package, which the interpreter of this program must have. Its folder holds the
Python blocks of the page that begin with a comment, `# NAME.py`, as files of these names.

What differs from run to run is not compared: process ids, ports, times, and which of two processes printed first.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = Path(__file__).resolve().parent
SECONDS = 120
BLOCK = re.compile(r"<!-- output: (?P<machine>\w+): (?P<command>.+?) -->\n```text\n(?P<text>.*?)```\n", re.DOTALL)
PROGRAM = re.compile(r"^```python\n(?P<text># (?P<name>\w+\.py)\n.*?)^```$", re.DOTALL | re.MULTILINE)
MACHINES = ("mock", "ascend", "gpu", "python")


CHANGING = [
    (re.compile(r"\bpid=\d+|\bprocess \d+"), "PROCESS"),
    (re.compile(r"(127\.0\.0\.1):\d+"), r"\1:PORT"),
    (re.compile(r"\d+(\.\d+)? (ns|µs|ms|s|[KMG]i?B/s)\b"), "MEASURED"),
]


class Failed(Exception):
    """A command did not do what the page says."""


def environment(machine: str, programs: Path) -> dict[str, str]:
    """What a command sees: one machine, and our programs first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEVICE_IPC_")}
    kept["PATH"] = f"{programs}:{programs / 'examples'}:{kept.get('PATH', '')}"
    if machine == "mock":
        return {**kept, "DEVICE_IPC_BACKEND": "mock"}
    if machine == "python":
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
        return {**kept, "DEVICE_IPC_BACKEND": "mock", "DEVICE_IPC_MOCK": "devices=2"}
    if machine == "gpu":
        return {**kept, "DEVICE_IPC_BACKEND": "cuda"}
    library = programs / "libdevice_ipc_sim_ascendcl.so"
    if not library.is_file():
        raise Failed(f"{library} is not there: cargo build -p device-ipc-sim-ascendcl")
    return {
        **kept,
        "DEVICE_IPC_BACKEND": "ascend",
        "DEVICE_IPC_ASCEND_LIBRARY": str(library),
        "DEVICE_IPC_SIM_ASCEND": "devices=2",
    }


def run(command: str, variables: dict[str, str], programs: dict[str, str] | None = None) -> str:
    """The standard output of a command. What it leaves running is killed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        for name, text in (programs or {}).items():
            Path(folder, name).write_text(text)
        shell = subprocess.Popen(
            ["bash", "-o", "pipefail", "-ec", command],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            start_new_session=True,
        )
        try:
            status = shell.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"it did not end within {SECONDS} s") from error
        finally:
            try:
                os.killpg(shell.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            shell.wait()
        if status != 0:
            raise Failed(f"it ended with status {status}; its error stands above")
        output.seek(0)
        return output.read().decode()


def comparable(text: str) -> list[str]:
    """The lines without what differs from run to run."""
    for changing, mask in CHANGING:
        text = changing.sub(mask, text)
    return sorted(text.splitlines())


def stale(page: str, filled: str) -> list[str]:
    """The commands whose output is no longer what the page shows."""
    pairs = zip(BLOCK.finditer(page), BLOCK.finditer(filled), strict=True)
    return [
        f"{new['machine']}: {new['command']}: it now prints\n{new['text']}"
        for old, new in pairs
        if comparable(old["text"]) != comparable(new["text"])
    ]


def refreshed(page: str, machines: list[str], run_on) -> tuple[str, list[str]]:
    """The page with the blocks of these machines filled, and what failed. `run_on(machine, command)` gives the text."""
    failures = []

    def fill(block: re.Match[str]) -> str:
        machine, command = block["machine"], block["command"]
        if machine not in MACHINES:
            failures.append(f"{machine}: there is no such machine: {command}")
        if machine not in machines:
            return block[0]
        try:
            text = run_on(machine, command)
        except Failed as reason:
            failures.append(f"{machine}: {command}: {reason}")
            return block[0]
        return f"<!-- output: {machine}: {command} -->\n```text\n{text}```\n"

    return BLOCK.sub(fill, page), failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: mock and ascend")
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="where Cargo put them (default: target/debug)")
    parser.add_argument("--check", action="store_true", help="run everything, compare, and change nothing")
    arguments = parser.parse_args()
    machines = arguments.machine or ["mock", "ascend"]
    target = Path(os.environ.get("CARGO_TARGET_DIR", PAGES.parent.parent / "target"))
    programs = (arguments.programs or target / "debug").resolve()
    if machines != ["python"] and not (programs / "device-ipc").is_file():
        parser.error(f"{programs} holds no device-ipc: build it as said above, or say --programs FOLDER")
    failures = []
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text()
        written = {program["name"]: program["text"] for program in PROGRAM.finditer(text)}

        def run_on(machine: str, command: str, written: dict[str, str] = written) -> str:
            return run(command, environment(machine, programs), written if machine == "python" else {})

        if path.name != "README.md" and {block["machine"] for block in BLOCK.finditer(text)} != set(MACHINES):
            failures.append(f"{path.name}: it needs a block for each machine: {', '.join(MACHINES)}")
        filled, failed = refreshed(text, machines, run_on)
        failures += [f"{path.name}: {failure}" for failure in failed]
        if arguments.check:
            failures += [f"{path.name}: {failure}" for failure in stale(text, filled)]
        elif filled != text:
            path.write_text(filled)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

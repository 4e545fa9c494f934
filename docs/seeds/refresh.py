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
    of_machine = {
        "mock": {"DEVICE_IPC_BACKEND": "mock"},
        "python": {"DEVICE_IPC_BACKEND": "mock", "DEVICE_IPC_MOCK": "devices=2"},
        "gpu": {"DEVICE_IPC_BACKEND": "cuda"},
        "ascend": {
            "DEVICE_IPC_BACKEND": "ascend",
            "DEVICE_IPC_ASCEND_LIBRARY": str(programs / "libdevice_ipc_sim_ascendcl.so"),
            "DEVICE_IPC_SIM_ASCEND": "devices=2",
        },
    }[machine]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEVICE_IPC_")}
    interpreter = [str(Path(sys.executable).parent)] if machine == "python" else []
    path = os.pathsep.join([*interpreter, str(programs), str(programs / "examples"), kept.get("PATH", "")])
    return {**kept, **of_machine, "PATH": path}


def run(command: str, variables: dict[str, str], programs: dict[str, str]) -> str:
    """The standard output of a command. What it leaves running is killed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        for name, text in programs.items():
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
    failures: list[str] = []
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text()
        written = {program["name"]: program["text"] for program in PROGRAM.finditer(text)}

        def fill(block: re.Match[str], page: str = path.name, written: dict[str, str] = written) -> str:
            machine, command = block["machine"], block["command"]
            if machine not in machines:
                return block[0]
            try:
                printed = run(command, environment(machine, programs), written if machine == "python" else {})
            except Failed as reason:
                failures.append(f"{page}: {machine}: {command}: {reason}")
                return block[0]
            if arguments.check and comparable(printed) != comparable(block["text"]):
                failures.append(f"{page}: {machine}: {command}: it now prints\n{printed}")
            return f"<!-- output: {machine}: {command} -->\n```text\n{printed}```\n"

        if path.name != "README.md" and {block["machine"] for block in BLOCK.finditer(text)} != set(MACHINES):
            failures.append(f"{path.name}: it needs a block for each machine, and no other: {', '.join(MACHINES)}")
        filled = BLOCK.sub(fill, text)
        if not arguments.check and filled != text:
            path.write_text(filled)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

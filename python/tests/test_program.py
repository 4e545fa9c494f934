"""``python -m device_ipc``."""

import subprocess
import sys

import device_ipc
from test_share import ones


def run(command: str) -> str:
    arguments = [sys.executable, "-m", "device_ipc", command]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120).stdout


def test_program_shows_devices_backends_and_exports() -> None:
    assert "mock:0" in run("devices") and "mock:1" in run("devices")
    assert "mock: 2 devices" in run("doctor")
    export = device_ipc.share(ones(4))
    assert f"{export.nbytes} B, mock, held by no process" in run("ps")


def test_demonstration_adds_one() -> None:
    assert "[2. 2. 2.]" in run("demo")

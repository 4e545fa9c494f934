"""``python -m device_ipc``: a demonstration, what this machine has and shares, and a keeper of weights."""

from __future__ import annotations

import argparse
import subprocess
import sys

import device_ipc

from . import _keep

_IMPORTER = """
import sys
import numpy
import device_ipc
with device_ipc.open(sys.argv[1]) as mapping:
    array = numpy.from_dlpack(mapping)
    array += 1
"""


def demo() -> None:
    """Has a second process add 1 to a tensor, on the mock with NumPy."""
    try:
        import numpy
    except ImportError:
        sys.exit("the demonstration needs NumPy: pip install numpy")
    tensor = device_ipc.empty((2, 3), "float32", "mock:0")
    array = numpy.from_dlpack(tensor)
    array[:] = 1
    with device_ipc.share(tensor) as export:
        subprocess.run([sys.executable, "-c", _IMPORTER, str(export)], check=True)
    print(f"another process has added 1 to each element, without a copy:\n{array}")


def devices() -> None:
    """Lists the devices of this process."""
    for device in device_ipc.devices():
        print(f"{device.device:8} {device.memory_bytes / 2**30:8.1f} GiB  {device.uuid}  {device.name}")


def doctor() -> None:
    """Lists the backends with their devices, or with the reason why they are unavailable."""
    for backend, state in device_ipc.available().items():
        print(f"{backend}: {state if isinstance(state, str) else f'{len(state)} devices'}")


def ps() -> None:
    """Lists the processes of this host that share memory."""
    for process in device_ipc.list_exports():
        if isinstance(process, Exception):
            print(process)
            continue
        print(f"process {process['pid']} ({process['program']})")
        for export in process["exports"]:
            holders = ", ".join(str(pid) for pid in export["holders"]) or "no process"
            print(f"  export {export['export']}: {export['nbytes']} B, {export['backend']}, held by {holders}")


def main() -> None:
    """Runs the command that the arguments name."""
    commands = {"demo": demo, "devices": devices, "doctor": doctor, "ps": ps}
    parser = argparse.ArgumentParser(prog="python -m device_ipc", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        subparsers.add_parser(name, help=command.__doc__)
    _keep.add_arguments(subparsers.add_parser("keep", help="Keeps the tensors of safetensors files in device memory under a name."))
    arguments = parser.parse_args()
    if arguments.command != "keep":
        commands[arguments.command]()
        return
    try:
        _keep.run(arguments)
    except (device_ipc.Error, OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

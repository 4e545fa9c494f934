"""The package device_ipc with the backend acme: sharing, rings and channels between processes, and memory of NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import device_ipc
import numpy as np
import pytest

LIMIT = 120


def run(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Starts a process that the test communicates with or kills."""
    prelude = "import sys\nimport numpy as np\nimport device_ipc as d\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(program), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    """Waits for a process, and returns what it printed."""
    try:
        out, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    return out


def ones(*shape: int) -> device_ipc.Tensor:
    tensor = device_ipc.empty(shape, "float32", "acme:0")
    np.from_dlpack(tensor)[:] = 1
    return tensor


def test_backend_is_known_by_its_name() -> None:
    assert [device.device for device in device_ipc.available()["acme"]] == ["acme:0"]
    assert device_ipc.Stream("acme:0").device == "acme:0"
    with pytest.raises(ValueError, match='expected "acme:N"'):
        device_ipc.empty(1, "uint8", "acne:0")


def test_tensors_are_shared() -> None:
    tensor = ones(2, 3)
    with device_ipc.share({"a": tensor}) as export:
        program = "with d.open(sys.argv[1]) as mapping:\n    array = np.from_dlpack(mapping['a'])\n    array += 1\n    del array\n"
        finish(run(program, str(export)))
    assert (np.from_dlpack(tensor) == 2).all()


def test_memory_of_a_framework_is_recognized() -> None:
    array = np.from_dlpack(ones(4))
    with device_ipc.share(array) as export:
        assert export.descriptor.backend == "acme"
    with pytest.raises(device_ipc.Error):
        device_ipc.share(np.zeros(4))


def test_ring_hands_over_each_publication() -> None:
    with device_ipc.Ring(device_ipc.empty((2, 1024), "uint8", "acme:0"), slots=2) as ring:
        program = """
        with d.join(sys.argv[1]) as reader:
            total = 0
            for slot in reader:
                with slot:
                    total += int(np.from_dlpack(slot)[0])
        print(total)
        """
        reader = run(program, str(ring))
        ring.wait_readers(1, timeout=LIMIT)
        for number in range(100):
            with ring.write(timeout=LIMIT) as slot:
                np.from_dlpack(slot)[:] = number
    assert finish(reader) == f"{sum(range(100))}\n"


def test_channel_carries_tensors() -> None:
    name = f"acme-{os.getpid()}"
    with device_ipc.listen(name, backend="acme") as listener:
        program = """
        channel = d.connect(sys.argv[1], backend="acme")
        message = channel.receive(timeout=120)
        with message.exports[0].open() as tensor:
            array = np.from_dlpack(tensor)
            array += 1
            del array
        channel.send(b"done")
        channel.close()
        """
        other = run(program, name)
        channel = listener.accept(timeout=LIMIT)
    tensor = ones(4)
    channel.send(b"state", tensor)
    assert channel.receive(timeout=LIMIT).data == b"done"
    finish(other)
    assert (np.from_dlpack(tensor) == 2).all()

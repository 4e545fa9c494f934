"""Memory that other processes find by a name."""

import os

import numpy as np
import pytest
from conftest import Start

import device_ipc


def shared(value: float) -> device_ipc.Export:
    tensor = device_ipc.empty((3,), "float32", "mock:0", read_only=True)
    np.from_dlpack(tensor)[:] = value
    return device_ipc.share({"w": tensor}, access="r")


def test_other_process_opens_each_version_by_name(start: Start) -> None:
    name = f"python-{os.getpid()}"
    first, second = shared(1.0), shared(2.0)
    with device_ipc.keep(name, first) as keeper:
        assert (keeper.name, keeper.version, keeper.closed) == (name, 1, False)
        reader = start(
            """
            for line in sys.stdin:
                with d.open(line.strip()) as weights:
                    print(np.from_dlpack(weights["w"]).sum())
            """
        )
        assert reader.stdin and reader.stdout

        def ask() -> float:
            assert reader.stdin and reader.stdout
            reader.stdin.write(f"keeper:{name}\n")
            reader.stdin.flush()
            return float(reader.stdout.readline())

        assert ask() == 3.0
        keeper.replace(second)
        assert keeper.version == 2
        assert ask() == 6.0
        with pytest.raises(device_ipc.Error, match="already"):
            device_ipc.keep(name, first)
    assert keeper.closed
    with pytest.raises(ValueError, match="closed"):
        keeper.version
    with pytest.raises(device_ipc.TimeoutError, match=name):
        device_ipc.open(f"keeper:{name}", timeout=0.2)


def test_invalid_name_is_rejected() -> None:
    with pytest.raises(device_ipc.Error, match="invalid channel name"):
        device_ipc.keep("a/b", shared(1.0))
    with pytest.raises(device_ipc.Error, match="invalid channel name"):
        device_ipc.open("keeper:", timeout=0.1)

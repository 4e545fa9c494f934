"""Memory that other processes find by a name."""

import gc
import os
import threading

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


def test_reader_is_notified_of_a_new_version_and_keeps_the_former(start: Start) -> None:
    name = f"python-notified-{os.getpid()}"
    with device_ipc.keep(name, shared(1.0)) as keeper:
        reader = start(
            """
            import threading
            dropped = threading.Event()
            weights = d.open(sys.argv[1])
            weights.on_dropped(dropped.set)
            print("open", flush=True)
            assert dropped.wait(60)
            again = threading.Event()
            weights.on_dropped(again.set)  # at once
            assert again.wait(60)
            print(np.from_dlpack(weights["w"]).sum(), np.from_dlpack(d.open(sys.argv[1])["w"]).sum())
            """,
            f"keeper:{name}",
        )
        assert reader.stdout and reader.stdout.readline() == "open\n"
        keeper.replace(shared(2.0))
        assert reader.stdout.readline() == "3.0 6.0\n"
        assert reader.wait(60) == 0


def test_reader_is_notified_of_the_end_of_the_keepers_process(start: Start) -> None:
    name = f"python-killed-{os.getpid()}"
    keeper = start(
        """
        tensor = d.empty((3,), "float32", "mock:0", read_only=True)
        keeper = d.keep(sys.argv[1], d.share({"w": tensor}, access="r"))
        print("keeps", flush=True)
        sys.stdin.read()
        """,
        name,
    )
    assert keeper.stdout and keeper.stdout.readline() == "keeps\n"
    mapping = device_ipc.open(f"keeper:{name}")
    gone = threading.Event()
    mapping.on_gone(gone.set)
    assert not gone.is_set()
    keeper.kill()
    assert gone.wait(60)
    with pytest.raises(ValueError, match="closed"):
        mapping.close()
        mapping.on_gone(gone.set)


def test_callback_that_refers_to_its_mapping_keeps_nothing() -> None:
    export = shared(1.0)
    for _ in range(100):
        mapping = device_ipc.open(str(export))
        mapping.on_dropped(mapping.keys)
    del mapping
    gc.collect()
    export.close(timeout=60)


def test_invalid_name_is_rejected() -> None:
    with pytest.raises(device_ipc.Error, match="invalid channel name"):
        device_ipc.keep("a/b", shared(1.0))
    with pytest.raises(device_ipc.Error, match="invalid channel name"):
        device_ipc.open("keeper:", timeout=0.1)

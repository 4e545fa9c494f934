"""Sharing and opening between processes, with NumPy on the mock."""

import collections.abc
import subprocess

import numpy as np
import pytest

import device_ipc
from conftest import Start


def line(process: "subprocess.Popen[str]") -> str:
    """Reads a line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]", text: str) -> None:
    """Writes a line that a process reads."""
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def finish(process: "subprocess.Popen[str]") -> None:
    """Waits until a process has ended without an error."""
    assert process.wait(timeout=120) == 0


def ones(*shape: int, read_only: bool = False) -> device_ipc.Tensor:
    tensor = device_ipc.empty(shape, "float32", "mock:0", read_only=read_only)
    np.from_dlpack(tensor)[:] = 1
    return tensor


def test_tensor_is_written_in_place_by_another_process(start: Start) -> None:
    tensor = ones(4, 5)
    export = device_ipc.share(tensor)
    other = start(
        """
        with d.open(sys.argv[1]) as mapping:
            array = np.from_dlpack(mapping)
            assert array.shape == (4, 5) and array.dtype == np.float32, array
            array += 1
        """,
        str(export),
    )
    finish(other)
    export.wait_released(timeout=30)
    assert (np.from_dlpack(tensor) == 2).all()
    export.close(timeout=30)


def test_state_dict_is_a_mapping_of_names(start: Start) -> None:
    state = {f"layer.{i}": ones(i + 1, 3) for i in range(20)}
    export = device_ipc.share(state)
    assert export.names == list(state)
    other = start(
        """
        import collections.abc
        with d.open(sys.argv[1]) as state:
            assert isinstance(state, collections.abc.Mapping)
            assert len(state) == 20 and list(state)[:2] == ["layer.0", "layer.1"]
            assert "layer.3" in state and "nothing" not in state and state.get("nothing") is None
            for name, tensor in state.items():
                array = np.from_dlpack(tensor)
                assert (array == 1).all()
                array[:] = int(name.split(".")[1])
        """,
        str(export),
    )
    finish(other)
    export.close(timeout=30)
    for i, tensor in enumerate(state.values()):
        assert (np.from_dlpack(tensor) == i).all()
    assert issubclass(device_ipc.Mapping, collections.abc.Mapping)


def test_array_of_numpy_in_shareable_memory_is_shared_with_its_strides(start: Start) -> None:
    array = np.from_dlpack(device_ipc.empty((6, 4), "int64", "mock:0"))
    array[:] = np.arange(24).reshape(6, 4)
    export = device_ipc.share(array[1:5:2, 1:3])
    other = start(
        """
        with d.open(sys.argv[1]) as mapping:
            print(np.from_dlpack(mapping).tolist())
        """,
        str(export),
    )
    assert line(other) == "[[5, 6], [13, 14]]"
    finish(other)


def test_array_of_the_host_is_refused_with_the_reason() -> None:
    with pytest.raises(device_ipc.Error, match="not device memory"):
        device_ipc.share(np.zeros(4))

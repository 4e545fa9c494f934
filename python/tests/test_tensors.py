"""Lifetimes, access and layouts of tensors."""

import gc
import hashlib
import io
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import device_ipc
import device_ipc.numpy
from conftest import Gate, Start
from test_pool import simulated  # noqa: F401
from test_share import finish, line, ones, tell


def test_escaped_tensor_keeps_the_lease(start: Start) -> None:
    export = device_ipc.share({"a": ones(4), "b": ones(8)})
    other = start(
        """
        with d.open(sys.argv[1]) as mapping:
            array = np.from_dlpack(mapping["b"])
        assert mapping.closed
        view = array[2:]
        del array
        print("left", flush=True)
        sys.stdin.readline()
        assert (view == 1).all()
        del view
        print("dropped", flush=True)
        sys.stdin.readline()
        """,
        str(export),
    )
    assert line(other) == "left"
    with pytest.raises(device_ipc.StillHeldError):
        export.wait_released(timeout=0.3)
    tell(other, "drop")
    assert line(other) == "dropped"
    export.wait_released(timeout=30)
    tell(other, "end")
    finish(other)


def test_closed_views_raise_for_every_access() -> None:
    export = device_ipc.share({"a": ones(4), "b": ones(2)})
    with device_ipc.numpy.open(str(export)) as arrays:
        assert list(arrays) == ["a", "b"] and not arrays.closed
    accesses: list[Callable[[], object]] = [
        lambda: len(arrays),
        lambda: list(arrays),
        lambda: dict(arrays.items()),
        lambda: list(arrays.keys()),
        lambda: list(arrays.values()),
        lambda: arrays["a"],
        lambda: arrays.get("a"),
        lambda: arrays.tensor,
        lambda: "a" in arrays,
        lambda: arrays == {},
        lambda: bool(arrays),
    ]
    for access in accesses:
        with pytest.raises(ValueError, match="the mapping is closed"):
            access()
    assert arrays.closed
    arrays.close()
    export.close(timeout=30)


def test_closed_mapping_gives_no_tensors() -> None:
    export = device_ipc.share(ones(4))
    mapping = device_ipc.open(export.descriptor)
    mapping.close()
    mapping.close()
    uses: list[Callable[[], object]] = [
        lambda: mapping.tensor,
        lambda: mapping[""],
        lambda: np.from_dlpack(mapping),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_read_only_mapping_is_a_read_only_array(start: Start) -> None:
    export = device_ipc.share(ones(4, read_only=True), access="r")
    other = start(
        """
        with d.open(sys.argv[1]) as mapping:
            assert mapping.read_only and mapping.tensor.read_only
            array = np.from_dlpack(mapping)
            assert not array.flags.writeable
            try:
                mapping.__dlpack__()
            except BufferError as error:
                assert "read-only" in str(error)
                print("refused", flush=True)
        try:
            d.open(sys.argv[1], access="rw")
        except PermissionError as error:
            assert isinstance(error, d.NotPermittedError)
            print("not permitted", flush=True)
        """,
        str(export),
    )
    assert line(other) == "refused"
    assert line(other) == "not permitted"
    finish(other)


def test_object_is_dropped_after_the_last_lease() -> None:
    array = np.from_dlpack(ones(4))
    reference = weakref.ref(array)
    export = device_ipc.share(array)
    del array
    gc.collect()
    assert reference() is not None
    export.close(timeout=30)
    gc.collect()
    assert reference() is None


def test_capsule_that_no_consumer_takes_is_freed() -> None:
    tensor = ones(4)
    for _ in range(1000):
        tensor.__dlpack__()
        tensor.__dlpack__(max_version=(1, 0))
    with pytest.raises(BufferError):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 0))
    assert tensor.__dlpack_device__() == (1, 0)


def test_element_types_that_dlpack_lacks_travel_as_bytes() -> None:
    tensor = device_ipc.empty((4,), "float4_e2m1fn_x2", "mock:0")
    with pytest.raises(BufferError, match="float4"):
        tensor.__dlpack__()
    assert np.from_dlpack(tensor.bytes).shape == (4,)
    export = device_ipc.share(tensor)
    mapping = device_ipc.open(export.descriptor)
    assert mapping.tensor.dtype == "float4_e2m1fn_x2"


def block(names: list[str], read_only: bool = False) -> dict[str, object]:
    """Returns arrays of 64 B in one allocation, each at a distance of 256 B."""
    memory = np.from_dlpack(device_ipc.empty((256 * len(names),), "uint8", "mock:0", read_only=read_only))
    parts = [memory[256 * number :][:64].view(np.float32).reshape(4, 4) for number in range(len(names))]
    for number, part in enumerate(parts):
        part[:] = number
    return dict(zip(names, parts))


def test_each_allocation_is_one_region_of_all_its_tensors(start: Start) -> None:
    state = {**block([f"a{i}" for i in range(500)]), **block([f"b{i}" for i in range(500)])}
    state["transposed"] = state["a1"].T  # type: ignore[attr-defined]
    state["empty"] = state["a1"][:0]  # type: ignore[index]
    other = start(
        """
        import device_ipc.numpy
        with device_ipc.numpy.open(sys.argv[1]) as arrays:
            assert len(arrays.mapping.regions) == 2
            for start in "ab":
                for number in range(500):
                    assert (arrays[f"{start}{number}"] == number).all(), (start, number)
            assert arrays["transposed"].strides == (4, 16) and arrays["empty"].shape == (0, 4)
            kept = arrays["b499"]
            print("left", flush=True)
        sys.stdin.readline()
        kept += 1
        del kept, arrays
        print("dropped", flush=True)
        sys.stdin.readline()
        """,
        str(export := device_ipc.share(state)),
    )
    assert line(other) == "left"
    with pytest.raises(device_ipc.StillHeldError):
        export.wait_released(timeout=0.3)
    tell(other, "drop")
    assert line(other) == "dropped"
    export.wait_released(timeout=30)
    assert (state["b499"] == 500).all()  # type: ignore[attr-defined]
    tell(other, "end")
    finish(other)


def test_read_only_views_are_read_only() -> None:
    export = device_ipc.share(block(["a"], read_only=True), access="r")
    array = device_ipc.numpy.open(str(export))["a"]
    assert not array.flags.writeable and (array == 0).all()


def test_numpy_takes_tensors_without_a_copy() -> None:
    tensor = ones(4)
    array = np.asarray(tensor)
    assert array.shape == (4,) and array.dtype == np.float32
    array[1] = 5
    with device_ipc.share(tensor) as export, device_ipc.open(str(export)) as mapping:
        assert np.asarray(mapping).tolist() == np.asarray(mapping.tensor).tolist() == [1, 5, 1, 1]
    copied = np.array(tensor)
    copied[:] = 0
    assert np.asarray(tensor, dtype="int64").tolist() == [1, 5, 1, 1]
    with device_ipc.Ring(device_ipc.empty((2, 256), "uint8", "mock:0"), slots=2) as ring:
        with device_ipc.join(str(ring)) as reader:
            with ring.write(timeout=30) as slot:
                np.asarray(slot)[:] = 7
            read = reader.next(timeout=30)
            assert read is not None
            with read:
                assert np.asarray(read).tolist() == [7] * 256


def test_element_types_that_numpy_lacks_are_refused() -> None:
    export = device_ipc.share({"a": device_ipc.empty((4,), "float4_e2m1fn_x2", "mock:0")})
    with pytest.raises(TypeError, match="float4_e2m1fn_x2"):
        device_ipc.numpy.open(str(export))


def test_negative_strides_are_refused() -> None:
    array = np.from_dlpack(ones(4))
    with pytest.raises(ValueError, match="negative stride"):
        device_ipc.share(array[::-1])


def test_cuda_array_interface_is_absent_on_the_mock() -> None:
    assert not hasattr(ones(4), "__cuda_array_interface__")
    export = device_ipc.share({"a": ones(1)})
    assert not hasattr(device_ipc.open(export.descriptor), "__cuda_array_interface__")


def test_interface_of_cuda_is_read() -> None:
    class Array:
        __cuda_array_interface__ = {
            "shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None
        }

    with pytest.raises(device_ipc.BackendError, match="cuda"):
        device_ipc.share(Array())


def test_stream_of_the_exporter_delays_the_reader() -> None:
    tensor = ones(4)
    stream = device_ipc.Stream("mock:0")
    gate = Gate(stream)
    export = device_ipc.share(tensor, ready=stream)
    reading = device_ipc.Stream("mock:0")
    with device_ipc.open(export.descriptor, stream=reading) as mapping:
        assert not gate.is_open
        gate.open_soon()
        assert (np.from_dlpack(mapping) == 1).all()
        assert gate.is_open


def test_device_is_chosen_by_name_and_by_map(start: Start) -> None:
    export = device_ipc.share(ones(4))
    other = start(
        """
        with d.open(sys.argv[1], device="mock:1") as mapping:
            print(*mapping.devices)
        home = mapping = d.Descriptor(sys.argv[1]).homes[0]
        with d.open(sys.argv[1], device={home: "mock:1"}) as mapping:
            print(*mapping.devices)
        """,
        str(export),
    )
    assert line(other) == line(other) == "mock:1"
    finish(other)
    with pytest.raises(ValueError, match="not a device"):
        device_ipc.empty((1,), "uint8", "tpu:0")


def test_devices_and_backends_are_listed() -> None:
    assert [device.device for device in device_ipc.devices() if device.backend == "mock"] == ["mock:0", "mock:1"]
    assert device_ipc.available()["cuda"]


def test_buffers_of_the_mock_are_its_memory() -> None:
    tensor = device_ipc.empty((3, 4), "float32", "mock:0")
    with memoryview(tensor) as view:
        assert (view.format, view.shape, view.strides, view.nbytes, view.readonly) == ("f", (3, 4), (16, 4), 48, False)
        view[1, 2] = 5
    assert np.asarray(tensor)[1, 2] == 5
    assert bytes(tensor) == np.asarray(tensor).tobytes()
    formats = {"bool": "?", "int8": "b", "uint64": "Q", "float16": "e", "float64": "d", "complex64": "Zf"}
    for dtype, expected in formats.items():
        assert memoryview(device_ipc.empty((2,), dtype, "mock:0")).format == expected
    assert memoryview(device_ipc.empty((), "int32", "mock:0")).shape == ()
    assert memoryview(device_ipc.empty((0, 2), "int32", "mock:0")).nbytes == 0
    half = device_ipc.empty((2,), "bfloat16", "mock:0")
    with pytest.raises(BufferError, match="no format for bfloat16; tensor.bytes"):
        memoryview(half)
    with pytest.raises(TypeError, match="NumPy has no element type bfloat16; tensor.bytes"):
        np.asarray(half)
    assert memoryview(half.bytes).nbytes == np.asarray(half.bytes).nbytes == 4


def test_buffer_keeps_the_mapping_and_the_access(start: Start) -> None:
    exporter = start("""
        tensor = d.empty((4,), "float32", "mock:0", read_only=True)
        export = d.share({"w": tensor}, access="r")
        print(export)
        export.wait_released()
        print("released")
    """)
    assert exporter.stdout is not None
    text = exporter.stdout.readline().strip()
    with pytest.warns(ResourceWarning, match="'w'"):
        with device_ipc.open(text) as mapping:
            view = memoryview(mapping["w"])
    assert view.readonly and len(view.tobytes()) == 16
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    with pytest.raises(TypeError, match="read-write"):
        io.BytesIO(bytes(16)).readinto(view.obj)
    view.release()
    assert exporter.stdout.readline() == "released\n"


def test_rows_of_a_transposed_tensor_have_strides() -> None:
    tensor = device_ipc.empty((3, 4), "int16", "mock:0")
    np.asarray(tensor)[:] = np.arange(12).reshape(3, 4)
    with device_ipc.share(np.asarray(tensor).T) as export, device_ipc.open(str(export)) as mapping:
        with memoryview(mapping.tensor) as view:
            assert view.strides == (2, 8) and view.f_contiguous
            assert np.asarray(view).tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
        with pytest.raises(BufferError, match="not contiguous"):
            hashlib.sha256(mapping.tensor)


def test_memory_of_a_device_is_no_array_of_the_host(simulated: Start) -> None:  # noqa: F811
    program = """
for what, error in ((memoryview, BufferError), (bytes, BufferError), (np.asarray, TypeError)):
    try:
        what(d.empty((4,), "float32", "cuda:0"))
    except error as raised:
        assert "cuda:0" in str(raised) and "copy it" in str(raised), raised
    else:
        raise AssertionError(what)
print("refused")
"""
    process = simulated(program)
    assert line(process) == "refused"
    finish(process)

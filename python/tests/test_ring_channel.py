"""Rings and channels between processes."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import device_ipc
from conftest import Start, unique
from test_pool import simulated  # noqa: F401
from test_share import finish, line, ones, tell


def test_ring_hands_over_each_publication_once(start: Start) -> None:
    memory = device_ipc.empty((2, 1024), "uint8", "mock:0")
    with device_ipc.Ring(memory, slots=2) as ring:
        other = start(
            """
            total = 0
            with d.join(sys.argv[1]) as reader:
                for slot in reader:
                    with slot:
                        array = np.from_dlpack(slot).view(np.int32)
                        assert (array == slot.sequence).all(), slot
                        total += int(array[0])
            print(total)
            """,
            str(ring),
        )
        ring.wait_readers(1, timeout=30)
        for number in range(1000):
            with ring.write(timeout=30) as slot:
                assert slot.sequence == number
                np.from_dlpack(slot).view(np.int32)[:] = number
    assert line(other) == str(sum(range(1000)))
    finish(other)


def test_slots_keep_element_type_and_shape(start: Start) -> None:
    memory = device_ipc.empty((2, 3, 64), "float32", "mock:0")
    with device_ipc.Ring(memory, slots=2) as ring:
        other = start(
            """
            with d.join(sys.argv[1]) as reader:
                for slot in reader:
                    with slot:
                        array = np.from_dlpack(slot)
                        assert slot.tensor.shape == array.shape == (3, 64) and array.dtype == np.float32, slot.tensor
                        assert (array == np.arange(192).reshape(3, 64) + slot.sequence).all()
            print("end")
            """,
            str(ring),
        )
        ring.wait_readers(1, timeout=30)
        for number in range(5):
            with ring.write(timeout=30) as slot:
                assert (slot.tensor.dtype, slot.tensor.shape, slot.tensor.strides) == ("float32", (3, 64), (64, 1))
                np.from_dlpack(slot)[:] = np.arange(192).reshape(3, 64) + number
    assert line(other) == "end"
    finish(other)


@pytest.mark.parametrize(
    ("shape", "dtype", "slots", "expected"),
    [
        ((4, 64), "float32", 2, (2, 64)),
        ((1024,), "bfloat16", 2, (512,)),
        ((1000,), "float16", 2, (384,)),
        ((1, 128), "int64", 1, (128,)),
        ((2, 256), "bool", 2, (256,)),
    ],
)
def test_first_axis_is_divided_into_slots(shape: "tuple[int, ...]", dtype: str, slots: int, expected: "tuple[int, ...]") -> None:
    with device_ipc.Ring(device_ipc.empty(shape, dtype, "mock:0"), slots=slots) as ring:
        slot = ring.write(timeout=30)
        assert (slot.tensor.dtype, slot.tensor.shape) == (dtype, expected)
        del slot


@pytest.mark.parametrize(
    ("memory", "slots", "message"),
    [
        (lambda: device_ipc.empty((3, 64), "float32", "mock:0"), 2, "3 elements on its first axis"),
        (lambda: device_ipc.empty((2, 100), "float32", "mock:0"), 2, "slots of 400 B, and a slot is a multiple of 256 B"),
        (lambda: np.from_dlpack(device_ipc.empty((64, 64), "float32", "mock:0")).T, 2, "gaps or is transposed"),
        (lambda: device_ipc.empty((), "float32", "mock:0"), 2, "without axes"),
        (lambda: device_ipc.empty((64,), "float32", "mock:0"), 2, "too few"),
        (lambda: device_ipc.empty((64,), "float32", "mock:0"), 0, "ring of 0 slots"),
    ],
)
def test_memory_that_cannot_be_divided_into_slots(memory: "Callable[[], object]", slots: int, message: str) -> None:
    with pytest.raises(device_ipc.LayoutError, match=message):
        device_ipc.Ring(memory(), slots=slots)


def test_ring_on_streams() -> None:
    ring = device_ipc.Ring(device_ipc.empty((2048,), "uint8", "mock:0"))
    writing, reading = device_ipc.Stream("mock:0"), device_ipc.Stream("mock:0")
    reader = device_ipc.join(ring.descriptor)
    for number in range(10):
        slot = ring.write(writing)
        writing.synchronize()
        np.from_dlpack(slot)[:] = number
        slot.publish()
        with pytest.raises(ValueError, match="already"):
            slot.publish()
        received = reader.next_ahead(reading)
        assert (np.from_dlpack(received) == number).all()
        received.release()
    reader.close()
    ring.close(timeout=30)
    with pytest.raises(ValueError, match="closed"):
        ring.write()


def test_ring_is_opened_by_join_only() -> None:
    memory = device_ipc.empty((2, 256), "uint8", "mock:0")
    with device_ipc.Ring(memory, slots=2) as ring:
        with pytest.raises(device_ipc.DescriptorError, match=r"a ring.*device_ipc\.join"):
            device_ipc.open(str(ring))
        with device_ipc.join(str(ring)) as reader:
            assert reader is not None
    export = device_ipc.share(device_ipc.empty((64,), "uint8", "mock:0"))
    with pytest.raises(device_ipc.DescriptorError, match=r"a ring.*device_ipc\.open"):
        device_ipc.join(str(export))


def test_slot_taken_ahead_is_ready_when_it_is_published(start: Start) -> None:
    ring = device_ipc.Ring(device_ipc.empty((2048,), "uint8", "mock:0"))
    other = start(
        """
        stream = d.Stream("mock:0")
        reader = d.join(sys.argv[1])
        with reader.next_ahead(stream) as slot:
            print("taken", flush=True)
            print(int(np.from_dlpack(slot)[0]), flush=True)
        assert reader.next(timeout=30) is None
        try:
            reader.next_ahead(stream)
        except d.GoneError:
            print("ended", flush=True)
        """,
        str(ring),
    )
    assert line(other) == "taken"
    with ring.write(timeout=30) as slot:
        np.from_dlpack(slot)[:] = 7
    assert line(other) == "7"
    ring.close(timeout=30)
    assert line(other) == "ended"
    finish(other)


def test_killed_writer_ends_the_ring(start: Start) -> None:
    other = start(
        """
        ring = d.Ring(d.empty((2048,), "uint8", "mock:0"))
        print(ring, flush=True)
        ring.wait_readers(1)
        ring.write().publish()
        print("published", flush=True)
        sys.stdin.readline()
        """
    )
    reader = device_ipc.join(line(other))
    assert line(other) == "published"
    slot = reader.next(timeout=30)
    assert slot is not None and slot.sequence == 0
    other.kill()
    with pytest.raises(device_ipc.GoneError):
        reader.next(timeout=30)


def test_channel_carries_bytes_tensors_and_mappings(start: Start) -> None:
    with device_ipc.listen(unique("python-channel")) as listener:
        other = start(
            """
            channel = d.connect(unique("python-channel"))
            message = channel.receive(timeout=30)
            assert message.data == b"state", message.data
            first, second = message.exports
            with first.open() as tensor, second.open() as state:
                assert (np.from_dlpack(tensor) == 1).all()
                assert sorted(state) == ["a", "b"]
                np.from_dlpack(state["b"])[:] = 9
            channel.send(b"done")
            channel.close()
            """
        )
        channel = listener.accept(timeout=30)
    state = {"a": ones(2), "b": ones(3)}
    channel.send(b"state", ones(4), state)
    assert channel.receive(timeout=30).data == b"done"
    with pytest.raises(device_ipc.GoneError):
        channel.receive(timeout=30)
    finish(other)
    assert (np.from_dlpack(state["b"]) == 9).all()


def test_connect_without_a_listener_times_out() -> None:
    with pytest.raises(TimeoutError, match="python-no-listener"):
        device_ipc.connect("python-no-listener", timeout=0.2)


def test_connect_makes_one_connection_however_long_the_listener_takes(start: Start) -> None:
    name = f"one-connection-{os.getpid()}"

    def queued() -> int:
        """Returns the number of connections that wait for the listener: those that have been given up count as well."""
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sum(name in one for one in lines) - 1

    with device_ipc.listen(name) as listener:
        assert queued() == 0
        other = start(
            """
            channel = d.connect(sys.argv[1], timeout=60)
            print(bytes(channel.receive(timeout=60).data).decode(), flush=True)
            """,
            name,
        )
        until = time.monotonic() + 60
        while queued() == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
        # Longer than any part of the wait, between which it looks at signals.
        time.sleep(1.5)
        assert queued() == 1
        channel = listener.accept(timeout=60)
        channel.send(b"hello")
        assert line(other) == "hello"
        channel.close()


def test_end_of_the_block_of_a_slot_follows_the_current_stream(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    writer = simulated(
        """
ring = d.Ring(d.empty((1, 256), "uint8", "cuda:0"), slots=1)
print(ring, flush=True)
ring.wait_readers(1, timeout=60)
ring.write(timeout=60).publish()
sys.stdin.readline()
try:
    ring.write(timeout=0)
    print("released", flush=True)
except TimeoutError:
    print("in use", flush=True)
ring.write(timeout=60).publish()
print("released", flush=True)
sys.stdin.readline()
"""
    )
    reader = simulated(
        """
from device_ipc import _streams
stream = d.Stream("cuda:0")
# What a framework's stream is, once the framework is imported.
_streams.current = lambda kind, device: stream.handle
reader = d.join(sys.argv[1], timeout=60)
with reader.next(timeout=60):
    gate = Gate(stream)
print("left", flush=True)
sys.stdin.readline()
gate.open()
print("open", flush=True)
sys.stdin.readline()
""",
        line(writer),
    )
    assert line(reader) == "left"
    tell(writer, "the work of the reader has not finished")
    assert line(writer) == "in use"
    tell(reader, "it finishes")
    assert line(reader) == "open"
    assert line(writer) == "released"
    for process in (writer, reader):
        tell(process, "end")
        finish(process)

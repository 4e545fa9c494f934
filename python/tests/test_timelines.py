"""Timelines between two processes, and the readers of a ring as its writer sees them."""

import pickle
import subprocess
import threading
from collections.abc import Callable

import numpy as np
import pytest

import device_ipc
from conftest import Start
from test_pool import simulated as simulated
from test_share import finish, line, ones, tell

PEER = """
mapping = d.open(sys.argv[1], device=sys.argv[2])
timeline = mapping.timeline()
print("ready", flush=True)
"""


def test_streams_and_hosts_take_turns_over_one_mapping(start: Start) -> None:
    tensor = device_ipc.empty((4,), "int32", "mock:0")
    array = np.from_dlpack(tensor)
    export = device_ipc.share(tensor)
    process = start(
        PEER
        + """
array = np.from_dlpack(mapping)
stream = d.Stream("mock:0")
for number in range(1, 51):
    timeline.wait(number, stream)
    stream.synchronize()
    assert timeline.value >= number
    assert (array == number).all(), array
    timeline.signal(number, stream)
timeline.check()
assert timeline.last_signalled == 50
print("done", flush=True)
sys.stdin.readline()
""",
        str(export),
        "mock:0",
    )
    assert line(process) == "ready"
    (timeline,) = export.timelines(timeout=60)
    assert timeline.peer == process.pid
    for number in range(1, 51):
        array[:] = number
        timeline.signal_now(number)
        timeline.wait_now(number, timeout=60)
    assert line(process) == "done"
    timeline.check()
    tell(process, "end")
    finish(process)
    export.close(timeout=60)
    with pytest.raises(device_ipc.GoneError):
        timeline.check()


def test_signal_follows_the_work_of_its_stream(start: Start) -> None:
    export = device_ipc.share(ones(4))
    process = start(
        PEER
        + """
stream = d.Stream("mock:0")
timeline.wait(1, stream)
timeline.signal(1, stream)    # not before the wait
print("submitted", flush=True)
sys.stdin.readline()
""",
        str(export),
        "mock:0",
    )
    assert line(process) == "ready"
    (timeline,) = export.timelines(timeout=60)
    assert line(process) == "submitted"
    assert timeline.value == 0
    with pytest.raises(device_ipc.TimeoutError, match=r"value 1 .* has signalled 0"):
        timeline.wait_now(1, timeout=0)
    timeline.signal_now(1)
    timeline.wait_now(1, timeout=60)
    assert timeline.value == 1
    tell(process, "end")
    finish(process)


def test_death_of_the_importer_ends_waits_and_is_reported(start: Start) -> None:
    export = device_ipc.share(ones(4))
    process = start(PEER + "sys.stdin.readline()", str(export), "mock:0")
    assert line(process) == "ready"
    (timeline,) = export.timelines(timeout=60)
    stream = device_ipc.Stream("mock:0")
    timeline.wait(1, stream)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            timeline.wait_now(1)
        except BaseException as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    process.kill()
    stream.synchronize()
    waiting.join(60)
    assert isinstance(ended[0], device_ipc.GoneError)
    with pytest.raises(device_ipc.GoneError):
        timeline.check()


def test_invalid_values_and_streams_are_refused() -> None:
    export = device_ipc.share(ones(4))
    mapping = device_ipc.open(export.descriptor)
    timeline = mapping.timeline()
    timeline.signal_now(3)
    with pytest.raises(device_ipc.Error, match="3"):
        timeline.signal_now(3)
    with pytest.raises(device_ipc.Error, match="2\\^62"):
        timeline.wait_now(2**62)
    with pytest.raises(TypeError, match="pass a stream, or call signal_now or wait_now"):
        timeline.wait(1)
    with pytest.raises(TypeError, match="Mapping.timeline"):
        pickle.dumps(timeline)
    with pytest.raises(device_ipc.TimeoutError, match="2 timelines"):
        export.timelines(2, timeout=0)
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.timeline()


def test_close_ends_the_wait_for_timelines() -> None:
    export = device_ipc.share(ones(4))
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            export.timelines()
        except BaseException as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    export.close(timeout=60)
    waiting.join(60)
    assert isinstance(ended[0], ValueError) and "closed" in str(ended[0])


def test_timelines_on_the_simulated_driver(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    exporter = simulated(
        """
enter(0)
tensor = d.empty((4,), "uint32", "cuda:0")
export = d.share(tensor)
print(export, flush=True)
(timeline,) = export.timelines(timeout=60)
stream = d.Stream("cuda:0")
for number in range(1, 21):
    assert fill(tensor.ptr, number, 4) == 0
    call("cuStreamSynchronize", None)
    timeline.signal(number, stream)
    timeline.wait_now(number, timeout=60)
timeline.check()
print("done", flush=True)
export.close(timeout=60)
"""
    )
    importer = simulated(
        "enter(0)"
        + PEER
        + """
stream = d.Stream("cuda:0")
for number in range(1, 21):
    timeline.wait(number, stream.handle)    # as a number: of the device of the mapping
    stream.synchronize()
    assert read(mapping.tensor.ptr) == number
    timeline.signal(number, stream.handle)
print("done", flush=True)
sys.stdin.readline()    # the exporter checks the timeline before it ends
mapping.close()
d.shutdown()
""",
        line(exporter),
        "cuda:0",
    )
    assert line(importer) == "ready"
    assert line(importer) == "done"
    assert line(exporter) == "done"
    tell(importer, "end")
    finish(importer)
    finish(exporter)


def test_reader_that_holds_up_a_ring_is_dismissed(start: Start) -> None:
    ring = device_ipc.Ring(device_ipc.empty((2, 256), "uint8", "mock:0"))
    watch = ring.watch()
    assert ring.readers_behind() == [] and watch.count == 0
    process = start(
        """
        reader = d.join(sys.argv[1])
        slot = reader.next()
        print("holds", flush=True)
        sys.stdin.readline()
        try:
            slot.release()
        except d.Error as error:
            print("dismissed" in str(error), flush=True)
        """,
        str(ring),
    )
    ring.wait_readers(timeout=60)
    ring.write().publish()
    ring.write().publish()
    assert line(process) == "holds"
    written: list[device_ipc.RingWriteSlot] = []
    waiting = threading.Thread(target=lambda: written.append(ring.write()))
    waiting.start()
    (behind,) = ring.readers_behind()
    assert (behind.pid, behind.sequence) == (process.pid, 0)
    assert watch.count == ring.readers == 1
    assert str(process.pid) in repr(behind)
    assert ring.dismiss(behind)
    assert not watch.dismiss(behind)
    waiting.join(60)
    assert len(written) == 1
    tell(process, "end")
    assert line(process) == "True"
    finish(process)
    written.pop().publish()
    ring.close(timeout=60)
    with pytest.raises(ValueError, match="closed"):
        ring.readers_behind()


def test_watch_dismisses_the_reader_that_a_close_waits_for() -> None:
    ring = device_ipc.Ring(device_ipc.empty((2, 256), "uint8", "mock:0"))
    watch = ring.watch()
    reader = device_ipc.join(str(ring))
    ring.write().publish()
    ring.write().publish()
    with pytest.raises(device_ipc.StillHeldError):
        ring.close(timeout=0)
    assert [behind.sequence for behind in watch.readers_behind()] == [0]
    (behind,) = watch.readers_behind()
    assert watch.dismiss(behind)
    assert watch.count == 0
    reader.close()

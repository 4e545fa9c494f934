"""Peers that die, stop, fork and exit."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import device_ipc
from conftest import Gate, Start, suspend, unique
from test_share import finish, line, ones, tell

HOLD = """
with d.open(sys.argv[1]) as mapping:
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_killed_importer_releases_its_lease(start: Start) -> None:
    export = device_ipc.share(ones(4))
    other = start(HOLD, str(export))
    assert line(other) == "open"
    assert [holder.pid for holder in export.holders()] == [other.pid]
    export.recall()  # takes back idle leases only
    assert [holder.state for holder in export.holders()] == ["in use"]
    with pytest.raises(device_ipc.StillHeldError) as raised:
        export.wait_released(timeout=0.1)
    assert raised.value.holders[0].pid == other.pid
    assert isinstance(raised.value, device_ipc.TimeoutError) and isinstance(raised.value, TimeoutError)
    with pytest.raises(device_ipc.StillHeldError):
        export.close(timeout=0.1)
    assert not export.closed
    other.kill()
    export.close(timeout=30)
    assert export.closed
    with pytest.raises(device_ipc.StaleError):
        device_ipc.open(export.descriptor)


def test_idle_lease_is_recalled(start: Start) -> None:
    export = device_ipc.share(ones(4))
    other = start(
        """
        stream = d.Stream("mock:0")
        with d.open(sys.argv[1], device="mock:0", stream=stream):
            pass
        stream.synchronize()
        print("closed", flush=True)
        sys.stdin.readline()
        """,
        str(export),
    )
    assert line(other) == "closed"
    until(lambda: [holder.state for holder in export.holders()] == ["idle"])
    export.recall()
    until(lambda: not export.holders())
    tell(other, "end")
    finish(other)


def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_exit_of_the_block_of_an_export_waits_for_its_importers(start: Start) -> None:
    tensor = ones(4)
    with device_ipc.share(tensor) as export:
        other = start(HOLD + "np.from_dlpack(d.open(sys.argv[1]))[:] = 7", str(export))
        assert line(other) == "open"
        tell(other, "go")
        finish(other)
    assert export.closed
    assert (np.from_dlpack(tensor) == 7).all()


def test_killed_exporter_is_gone(start: Start) -> None:
    other = start(
        """
        tensor = d.empty((4,), "float32", "mock:0")
        export = d.share(tensor)
        print(export, flush=True)
        sys.stdin.readline()
        """
    )
    text = line(other)
    mapping = device_ipc.open(text)
    array = np.from_dlpack(mapping)
    other.kill()
    other.wait(timeout=30)
    with pytest.raises(device_ipc.GoneError):
        device_ipc.open(text, access="r")
    array[:] = 3  # the mock keeps the memory mapped, as the drivers do
    mapping.close()


def test_importer_that_dies_with_the_memory_in_use_is_reported_once(start: Start) -> None:
    export = device_ipc.share(ones(4))
    other = start(HOLD, str(export))
    assert line(other) == "open"
    lost = device_ipc.counters()["leases_lost_total"]
    other.kill()
    with pytest.raises(device_ipc.HolderDiedError) as raised:
        export.wait_released(timeout=30)
    assert isinstance(raised.value, device_ipc.GoneError)
    assert [holder.pid for holder in raised.value.holders] == [other.pid]
    assert [(holder.pid, holder.state) for holder in export.died()] == [(other.pid, "in use")]
    assert device_ipc.counters()["leases_lost_total"] == lost + 1
    export.wait_released(timeout=30)


@pytest.mark.parametrize("end", ["mapping.close()", "del mapping", "sys.exit()", "raise SystemExit"])
def test_exit_of_an_importer_finishes_its_device_work(start: Start, end: str) -> None:
    export, gate = device_ipc.share(ones(4)), device_ipc.share(ones(4))
    other = start(
        f"""
        stream = d.Stream("mock:0")
        mapping = d.open(sys.argv[1], device="mock:0", stream=stream)
        mapping.regions
        gate = d.open(sys.argv[2])
        gate.timeline().wait(1, stream)
        print("ends", flush=True)
        {end}
        """,
        str(export),
        str(gate),
    )
    assert line(other) == "ends"
    with pytest.raises(device_ipc.StillHeldError):
        export.wait_released(timeout=0.2)
    (timeline,) = gate.timelines(timeout=60)
    timeline.signal_now(1)
    finish(other)
    export.wait_released(timeout=30)
    assert export.died() == [] and not export.holders()


NEVER_READY = """
stream = d.Stream("mock:0")
tensor = d.empty((4,), "float32", "mock:0")
gate = Gate(stream)
export = d.share(tensor, ready=stream)
print(export, flush=True)
sys.stdin.readline()
"""


def test_check_fails_where_the_exporter_died_before_it_wrote(start: Start) -> None:
    stream = device_ipc.Stream("mock:0")

    def opened() -> device_ipc.Mapping:
        other = start(NEVER_READY)
        mapping = device_ipc.open(line(other), device="mock:0", stream=stream)
        mapping.check()
        other.kill()
        # The mock's stream may fail where it finds the process dead before its words are poisoned.
        with contextlib.suppress(device_ipc.Error):
            stream.synchronize()
        return mapping

    mapping = opened()
    with pytest.raises(device_ipc.GoneError):
        mapping.check()
    with pytest.raises(device_ipc.GoneError):
        mapping.close()
    assert mapping.closed
    mapping.close()
    with pytest.raises(device_ipc.GoneError), opened():
        pass
    with pytest.raises(ZeroDivisionError), opened():
        1 / 0  # noqa: B018


def test_open_from_a_stopped_exporter_times_out_and_ends_at_ctrl_c(start: Start) -> None:
    other = start(
        """
        export = d.share(d.empty((4,), "float32", "mock:0"))
        print(export, flush=True)
        sys.stdin.readline()
        """
    )
    text = line(other)
    suspend(other)
    with pytest.raises(device_ipc.TimeoutError, match="1000 ms|1 s"):
        device_ipc.open(text, timeout=1)
    waiting = start(
        """
        try:
            print("waiting", flush=True)
            d.open(sys.argv[1])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
        text,
    )
    assert line(waiting) == "waiting"
    interrupt(waiting)
    other.send_signal(signal.SIGCONT)
    device_ipc.open(text).close()


def test_ctrl_c_ends_a_request_over_a_connection_that_exists(start: Start) -> None:
    other = start(
        """
        exports = [d.share(d.empty((4,), "float32", "mock:0")) for _ in range(2)]
        print(*exports, flush=True)
        sys.stdin.readline()
        """
    )
    waiting = start(
        """
        connected = d.open(sys.argv[1])
        print("open", flush=True)
        sys.stdin.readline()
        try:
            print("waiting", flush=True)
            d.open(sys.argv[2], timeout=None)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
        *line(other).split(),
    )
    assert line(waiting) == "open"
    suspend(other)
    tell(waiting, "")
    assert line(waiting) == "waiting"
    interrupt(waiting)


def interrupt(process: "subprocess.Popen[str]") -> None:
    """Sends SIGINT to a process that has said that it waits, and checks that this ends the wait."""
    time.sleep(0.2)  # usually enough for it to wait; a signal that comes earlier ends it too
    process.send_signal(signal.SIGINT)
    assert line(process) == "interrupted"


WAITS = {
    "wait_released": "d.share(tensor).wait_released()",
    "wait_opened": "d.share(tensor).wait_opened()",
    "close": "e = d.share(tensor); m = d.open(e.descriptor); e.close()",
    "wait_readers": "d.Ring(tensor).wait_readers()",
    "write": "r = d.Ring(tensor); q = d.join(str(r)); r.write().publish(); r.write().publish(); r.write()",
    "next": "r = d.Ring(tensor); d.join(str(r)).next()",
    "iterate": "r = d.Ring(tensor); next(iter(d.join(str(r))))",
    "accept": "d.listen('python-accept').accept()",
    "synchronize": "s = d.Stream('mock:0'); g = Gate(s); s.synchronize()",
    "open": "s = d.Stream('mock:0'); g = Gate(s); e = d.share(tensor, ready=s); d.open(e.descriptor, timeout=None)",
    "connect": "d.connect('python-nobody', timeout=None)",
    "timelines": "d.share(tensor).timelines()",
    "wait_now": "e = d.share(tensor); m = d.open(e.descriptor); m.timeline().wait_now(1)",
    "receive": "l = d.listen('python-receive'); t = threading.Thread(target=lambda: keep.append(d.connect('python-receive')));"
    " t.start(); c = l.accept(); t.join(); c.receive()",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_every_wait(start: Start, wait: str) -> None:
    process = start(
        f"""
        import os, threading
        keep = []
        tensor = d.empty((1024,), "float32", "mock:0")
        try:
            print("waiting", flush=True)
            {WAITS[wait]}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            os._exit(0)
        """
    )
    assert line(process) == "waiting"
    interrupt(process)


def test_open_of_unwritten_memory_is_one_open(start: Start) -> None:
    """An open that is given up and repeated looks like an importer that has finished."""
    stream = device_ipc.Stream("mock:0")
    gate = Gate(stream)
    export = device_ipc.share(ones(4), ready=stream)
    importer = start(
        """
        mapping = d.open(sys.argv[1], timeout=None)
        print("opened", flush=True)
        sys.stdin.readline()
        mapping.close()
        d.close_unused()
        """,
        str(export),
    )
    export.wait_opened(timeout=60)
    with pytest.raises(device_ipc.StillHeldError):
        export.wait_released(timeout=1)
    gate.open()
    assert line(importer) == "opened"
    tell(importer, "close")
    export.wait_released(timeout=60)
    finish(importer)
    assert export.opened == 1


def test_close_waits_for_an_owner_whose_drop_takes_long() -> None:
    dropped = threading.Event()

    class Owner(np.ndarray):
        def __del__(self) -> None:
            if type(self.base) is not Owner:
                dropped.wait(60)

    array = np.from_dlpack(device_ipc.empty((4,), "float32", "mock:0")).view(Owner)
    export = device_ipc.share(array)
    del array
    with pytest.raises(device_ipc.TimeoutError, match="after 200 ms"):
        export.close(timeout=0.2)
    threading.Timer(0.2, dropped.set).start()
    export.close(timeout=60)


def test_forked_child_gets_an_error_and_leaves_the_parent_alone(start: Start) -> None:
    process = start(
        """
        import os
        tensor = d.empty((4,), "float32", "mock:0")
        export = d.share(tensor)
        mapping = d.open(export.descriptor)
        pid = os.fork()
        if pid == 0:
            try:
                d.share(tensor)
            except d.ForkedError:
                del mapping, export, tensor
                sys.exit(7)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        np.from_dlpack(mapping)[:] = 1
        mapping.close()
        export.close(timeout=30)
        """
    )
    finish(process)


def test_every_object_raises_in_a_forked_child(start: Start) -> None:
    """Calls every method and reads every attribute that needs no further argument, except those that only describe the object."""
    process = start(
        """
        import inspect, os
        tensor = d.empty((4,), "float32", "mock:0")
        export = d.share(tensor)
        ring = d.Ring(d.empty((2, 256), "uint8", "mock:0"))
        reader = d.join(str(ring))
        writing = ring.write()
        writing.publish()
        objects = {
            "export": export, "mapping": d.open(export.descriptor), "ring": ring, "reader": reader,
            "slot": reader.next(timeout=30), "writing": ring.write(), "listener": d.listen(unique("python-forked")),
            "keeper": d.keep(unique("python-forked"), export), "watch": ring.watch(),
        }
        objects["timeline"] = objects["mapping"].timeline()
        objects["end"] = export.timelines()[0]
        describe = {
            "descriptor", "nbytes", "names", "name", "address", "sequence", "peer",
        }
        pid = os.fork()
        if pid == 0:
            wrong = []
            for kind, object in objects.items():
                for name in dir(object):
                    if name.startswith("_") or name in describe:
                        continue
                    try:
                        value = getattr(object, name)
                        if callable(value):
                            needed = [p for p in inspect.signature(value).parameters.values()
                                      if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
                            if needed:
                                continue
                            value = value()
                        wrong.append((kind, name, value))
                    except d.ForkedError:
                        pass
                    except BaseException as error:
                        wrong.append((kind, name, error))
            try:
                wrong.append(d.counters())
            except d.ForkedError:
                pass
            print(wrong, flush=True)
            os._exit(1 if wrong else 7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert export.opened == 1 and len(export.holders()) == 1
        """
    )
    assert line(process) == "[]"
    finish(process)


def write_five(descriptor: device_ipc.Descriptor) -> None:
    with device_ipc.open(descriptor) as mapping:
        np.from_dlpack(mapping)[:] = 5


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_descriptor_is_an_argument_of_multiprocessing(method: str) -> None:
    tensor = ones(8)
    export = device_ipc.share(tensor)
    context = multiprocessing.get_context(method)
    child = context.Process(target=write_five, args=(export.descriptor,))  # type: ignore[attr-defined]
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert (np.from_dlpack(tensor) == 5).all()


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "import threading; threading.Thread(target=wait, daemon=True).start()"])
def test_interpreter_exits_with_open_guards(start: Start, end: str) -> None:
    export = device_ipc.share(ones(4))
    process = start(
        f"""
        def wait():
            export.wait_released()
        tensor = d.empty((4,), "float32", "mock:0")
        export = d.share(tensor)
        own = d.open(str(export))
        other = d.open(sys.argv[1])
        array = np.from_dlpack(other)
        ring = d.Ring(d.empty((1024,), "uint8", "mock:0"))
        reader = d.join(str(ring))
        ring.write().publish()
        slot = reader.next(timeout=30)
        listener = d.listen(unique("python-exit"))
        {end}
        """,
        str(export),
    )
    finish(process)
    export.wait_released(timeout=30)


def test_guards_are_not_pickled_and_descriptors_are_text() -> None:
    tensor = ones(4)
    export = device_ipc.share(tensor)
    descriptor = export.descriptor
    copied = pickle.loads(pickle.dumps(descriptor))
    assert copied == descriptor and str(copied) == str(export) and hash(copied) == hash(descriptor)
    assert device_ipc.Descriptor(bytes(descriptor)) == descriptor
    mapping = device_ipc.open(descriptor)
    ring = device_ipc.Ring(device_ipc.empty((1024,), "uint8", "mock:0"))
    for guard in [tensor, export, mapping, ring, ring.write(), device_ipc.join(str(ring)), device_ipc.Stream("mock:0")]:
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(guard)
    with pytest.raises(device_ipc.DescriptorError):
        device_ipc.open("not a descriptor")


def test_no_repr_contains_the_token() -> None:
    export = device_ipc.share(ones(4))
    secret = set(str(export).split(":", 1)[1][i : i + 12] for i in range(0, len(str(export)) - 20))
    mapping = device_ipc.open(export.descriptor)
    for guard in [export, export.descriptor, mapping, mapping.tensor, mapping.descriptor, export.holders()]:
        assert not any(piece in repr(guard) for piece in secret), guard


def test_import_loads_no_library_and_starts_no_thread() -> None:
    program = """
import os, sys
import device_ipc, device_ipc.torch
assert not {"torch", "numpy", "cupy", "asyncio"} & set(sys.modules), set(sys.modules)
assert len(os.listdir("/proc/self/task")) == 1
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libascendcl" not in maps
assert device_ipc.counters()["exports"] == 0
device_ipc.devices()
assert len(os.listdir("/proc/self/task")) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_threads_share_and_open_at_the_same_time(start: Start) -> None:
    tensors = [ones(16) for _ in range(8)]
    exports = [device_ipc.share(tensor) for tensor in tensors]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(200):
                with device_ipc.open(exports[(number + step) % 8].descriptor) as mapping:
                    assert np.from_dlpack(mapping).shape == (16,)
                device_ipc.share(tensors[number])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and not any(thread.is_alive() for thread in threads)

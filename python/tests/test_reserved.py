"""Mappings at reserved addresses: suspended, resumed and replaced under the arrays that exist."""

import gc
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Start, suspend

import device_ipc
import device_ipc.numpy

EXPORTER = """
exports = {}
print("ready")
for line in sys.stdin:
    what, name, *rest = line.split()
    if what == "share":
        sizes = [int(size) for size in rest]
        tensors = {key: d.empty((size,), "float32", "mock:0", read_only=True) for key, size in zip("ab", sizes)}
        for position, tensor in enumerate(tensors.values()):
            np.from_dlpack(tensor)[:] = int(name) + position
        exports[name] = d.share(tensors)
        print(str(exports[name]))
    elif what == "fill":
        memory = d.empty((int(rest[0]),), "uint8", "mock:0", read_only=True)
        np.from_dlpack(memory)[:] = int(name)
        exports[name] = d.share(memory)
        print(str(exports[name]))
    elif what == "close":
        exports.pop(name).close(timeout=30)
        print("closed")
    elif what == "drop":
        del exports[name]
        print("dropped")
    elif what == "grant":
        print(str(exports[name].grant()))
    elif what == "keep":
        keeper = d.keep(rest[0], exports[name])
        print("kept")
    elif what == "next":
        keeper.replace(exports[name])
        print("kept")
"""


class Exporter:
    """A process that shares versions: arrays `a` and `b` with the values `version` and `version + 1`."""

    def __init__(self, start: Start) -> None:
        self.process: "subprocess.Popen[str]" = start(EXPORTER)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, text: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self._line()

    def share(self, version: int, *sizes: int) -> str:
        return self.ask(f"share {version} {' '.join(map(str, sizes or (4, 1000)))}")

    def fill(self, value: int, nbytes: int) -> str:
        return self.ask(f"fill {value} {nbytes}")

    def close(self, version: int) -> None:
        assert self.ask(f"close {version}") == "closed"


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def has(arrays: device_ipc.numpy.Arrays, version: int) -> bool:
    return bool((arrays["a"] == version).all() and (arrays["b"] == version + 1).all())


def test_arrays_keep_their_addresses_and_read_each_version(start: Start) -> None:
    exporter = Exporter(start)
    arrays = device_ipc.numpy.open(exporter.share(1), reserved=True)
    mapping = arrays.mapping
    places = {name: address(array) for name, array in arrays.items()}
    assert has(arrays, 1) and not mapping.is_suspended

    second = exporter.share(2)
    mapping.replace(second)
    assert has(arrays, 2) and str(mapping.descriptor) == second
    exporter.close(1)  # No lease is left on it.

    mapping.suspend()
    mapping.suspend()  # Does nothing.
    assert mapping.is_suspended and "suspended" in repr(mapping)
    exporter.close(2)

    mapping.resume(device_ipc.Descriptor(exporter.share(3)))
    assert has(arrays, 3) and not mapping.is_suspended
    mapping.replace(exporter.share(4), stream=device_ipc.Stream("mock:0"))
    assert has(arrays, 4)
    assert {name: address(array) for name, array in arrays.items()} == places
    assert {name: address(np.from_dlpack(tensor)) for name, tensor in mapping.items()} == places


def test_torch_tensors_keep_their_addresses(start: Start) -> None:
    torch = pytest.importorskip("torch")
    import device_ipc.torch

    exporter = Exporter(start)
    with device_ipc.torch.open(exporter.share(1), reserved=True, allow_read_only=True) as tensors:
        view, place = tensors["b"][:10], tensors["b"].data_ptr()
        tensors.mapping.suspend()
        exporter.close(1)
        assert tensors["b"].data_ptr() == place
        with pytest.raises(device_ipc.Error, match="suspended"):
            torch.from_dlpack(tensors.mapping)
        tensors.mapping.resume(exporter.share(5))
        assert (view == 6).all() and tensors["b"].data_ptr() == view.data_ptr() == place
        del view


def test_several_owners_are_one_tensor(start: Start) -> None:
    first, second = Exporter(start), Exporter(start)
    unit = device_ipc.Reservation("mock:0", 1).granularity
    reservation = device_ipc.Reservation("mock:0", 3 * unit)
    assert (reservation.nbytes, reservation.device) == (3 * unit, "mock:0") and "mock:0" in repr(reservation)
    at_start = device_ipc.open(first.fill(1, unit), reserved=(reservation, 0))
    middle = device_ipc.open(second.fill(2, unit), reserved=(reservation, unit))
    with pytest.raises(device_ipc.LayoutError, match=f"no.* memory at {2 * unit}"):
        reservation.tensor((3, unit), "uint8")
    with pytest.raises(device_ipc.PlacementError, match=f"offset {unit} B, length {unit} B"):
        device_ipc.open(second.fill(3, unit), reserved=(reservation, unit))
    with pytest.raises(device_ipc.LayoutError, match=f"multiples of {unit} B"):
        device_ipc.open(second.fill(3, unit), reserved=(reservation, 8))
    with pytest.raises(TypeError, match="offset"):
        device_ipc.open(first.fill(3, unit), reserved="there")  # type: ignore[arg-type]
    # A part of the range, and then all of it.
    rows = np.from_dlpack(reservation.tensor((2, unit), "uint8"))
    assert (rows[0] == 1).all() and (rows[1] == 2).all() and address(rows) == reservation.address
    at_end = device_ipc.open(first.fill(3, unit), reserved=(reservation, 2 * unit))
    tensor = reservation.tensor((3, unit // 4), "uint32")
    words = np.from_dlpack(tensor)
    assert (words == np.array([[0x01010101], [0x02020202], [0x03030303]], np.uint32)).all()
    assert np.from_dlpack(reservation.tensor(1, np.uint8, offset=2 * unit - 1))[0] == 2

    middle.replace(second.fill(4, unit))
    assert (words[1] == 0x04040404).all() and (words[0] == 0x01010101).all()
    middle.suspend()
    with pytest.raises(device_ipc.Error, match="suspended"):
        reservation.tensor((3, unit), "uint8")
    with pytest.raises((device_ipc.Error, BufferError), match="suspended"):
        np.from_dlpack(tensor)
    assert np.from_dlpack(reservation.tensor(unit, "uint8"))[0] == 1
    middle.resume(second.fill(5, unit))
    assert (words[1] == 0x05050505).all()

    # The death of an owner leaves the other parts, and the tensor keeps the memory.
    first.process.kill()
    first.process.wait(timeout=60)
    assert (words[1] == 0x05050505).all()
    middle.replace(second.fill(6, unit))
    del at_start, middle, at_end, reservation, rows
    gc.collect()
    assert (words[1] == 0x06060606).all() and (np.from_dlpack(tensor)[1] == 0x06060606).all()


def test_torch_tensor_over_several_owners(start: Start) -> None:
    torch = pytest.importorskip("torch")
    owners = [Exporter(start), Exporter(start)]
    unit = device_ipc.Reservation("mock:0", 1).granularity
    reservation = device_ipc.Reservation("mock:0", 2 * unit)
    parts = [
        device_ipc.open(owner.fill(index + 1, unit), reserved=(reservation, index * unit))
        for index, owner in enumerate(owners)
    ]
    rows = torch.from_dlpack(reservation.tensor((2, unit), torch.uint8))
    assert rows.data_ptr() == reservation.address and rows[:, -1].tolist() == [1, 2]
    parts[1].replace(owners[1].fill(7, unit))
    assert rows[:, 0].tolist() == [1, 7]


ADDRESSED = """
for line in sys.stdin:
    text, address, nbytes = line.split()
    try:
        reservation = d.Reservation("mock:0", int(nbytes), int(address))
        mapping = d.open(text, reserved=(reservation, 0))
        print(np.from_dlpack(mapping.regions[0]).__array_interface__["data"][0])
    except d.PlacementError as error:
        print("in use:", error)
"""


def test_two_processes_have_equal_addresses(start: Start) -> None:
    exporter, other = Exporter(start), start(ADDRESSED)
    assert other.stdin is not None and other.stdout is not None
    unit = device_ipc.Reservation("mock:0", 1).granularity
    text, reservations = exporter.fill(1, unit), []
    for tebibytes in range(16, 24):
        reservations.append(device_ipc.Reservation("mock:0", 1 << 24, tebibytes << 40))
        other.stdin.write(f"{text} {reservations[-1].address} {1 << 24}\n")
        other.stdin.flush()
        answer = other.stdout.readline().strip()
        if not answer.startswith("in use"):
            break
    mapping = device_ipc.open(text, reserved=(reservations[-1], 0))
    assert int(answer) == reservations[-1].address == address(np.from_dlpack(mapping.regions[0]))


def test_addresses_that_cannot_be_reserved_are_refused() -> None:
    reservation = device_ipc.Reservation("mock:0", 1)
    with pytest.raises(device_ipc.PlacementError, match="agree on another address"):
        device_ipc.Reservation("mock:0", 1, reservation.address)
    for wrong in (0, reservation.address + 1):
        with pytest.raises(device_ipc.LayoutError, match="multiples of"):
            device_ipc.Reservation("mock:0", 1, wrong)
    with pytest.raises(device_ipc.LayoutError):
        device_ipc.Reservation("mock:0", 0)
    with pytest.raises(device_ipc.PlacementError, match="99"):
        device_ipc.Reservation("mock:99", 1)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(reservation)


def test_forked_child_leaves_the_reservation(start: Start) -> None:
    forking = start(
        """
        import os
        unit = d.Reservation("mock:0", 1).granularity
        reservation = d.Reservation("mock:0", 2 * unit)
        mapping = d.open(sys.argv[1], reserved=(reservation, 0))
        if (child := os.fork()) == 0:
            try:
                d.open(sys.argv[2], reserved=(reservation, unit))
            except d.ForkedError:
                del reservation, mapping
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        second = d.open(sys.argv[2], reserved=(reservation, unit))
        print(np.from_dlpack(mapping.regions[0])[0], np.from_dlpack(second.regions[0])[0])
        """,
        (exporter := Exporter(start)).fill(1, 4096),
        exporter.fill(2, 4096),
    )
    assert forking.stdout is not None
    assert [forking.stdout.readline(), forking.stdout.readline()] == ["7\n", "1 2\n"]


def test_new_views_are_refused_while_suspended(start: Start) -> None:
    exporter = Exporter(start)
    text = exporter.share(1)
    mapping = device_ipc.open(text, reserved=True)
    tensor = mapping["a"]
    mapping.suspend()
    calls: "list[Callable[[], object]]" = [
        lambda: mapping["a"],
        lambda: mapping.get("a"),
        lambda: list(mapping.values()),
        lambda: mapping.regions,
        lambda: device_ipc.numpy.Arrays(mapping),
        lambda: np.from_dlpack(tensor),
        lambda: memoryview(tensor),
        lambda: np.asarray(tensor),
        lambda: mapping.grant(),
        lambda: mapping.timeline(),
        lambda: mapping.check(),
        lambda: mapping.replace(text),
    ]
    for call in calls:
        with pytest.raises((device_ipc.Error, BufferError), match="suspended"):
            call()
    # What needs no memory still works.
    assert list(mapping) == ["a", "b"] and "a" in mapping and len(mapping) == 2
    assert mapping.nbytes > 0 and mapping.devices == ["mock:0"] and mapping.read_only is not None
    mapping.resume(text)
    assert (np.from_dlpack(tensor) == 1).all()
    with pytest.raises(device_ipc.UnsupportedError, match="not suspended"):
        mapping.resume(text)


def test_export_of_another_layout_changes_nothing(start: Start) -> None:
    exporter = Exporter(start)
    first, other = exporter.share(1), exporter.share(2, 4, 999)
    arrays = device_ipc.numpy.open(first, reserved=True)
    with pytest.raises(device_ipc.LayoutError, match="999"):
        arrays.mapping.replace(other)
    assert has(arrays, 1) and str(arrays.mapping.descriptor) == first
    arrays.mapping.suspend()
    with pytest.raises(device_ipc.LayoutError, match="999"):
        arrays.mapping.resume(other)
    with pytest.raises(device_ipc.DescriptorError):
        arrays.mapping.resume("nothing")
    assert arrays.mapping.is_suspended
    exporter.close(2)
    arrays.mapping.resume(first)
    assert has(arrays, 1)


def test_killed_exporter_is_replaced_by_another(start: Start) -> None:
    killed, other = Exporter(start), Exporter(start)
    arrays = device_ipc.numpy.open(killed.share(1), reserved=True)
    of_killed = killed.share(2)
    killed.process.kill()
    killed.process.wait(timeout=60)
    with pytest.raises(device_ipc.GoneError):
        arrays.mapping.replace(of_killed)
    assert has(arrays, 1)
    arrays.mapping.replace(other.share(3))
    assert has(arrays, 3)
    arrays.mapping.suspend()
    with pytest.raises(device_ipc.GoneError):
        arrays.mapping.resume(of_killed)
    assert arrays.mapping.is_suspended
    arrays.mapping.resume(other.share(4))
    assert has(arrays, 4)


def test_arrays_follow_the_keeper_of_their_memory(start: Start) -> None:
    name = f"python-followed-{os.getpid()}"
    exporter = Exporter(start)
    first = exporter.share(1)
    assert exporter.ask(f"keep 1 {name}") == "kept"
    arrays = device_ipc.numpy.open(f"keeper:{name}", reserved=True)
    mapping, place = arrays.mapping, address(arrays["b"])
    assert mapping.follow() is None and has(arrays, 1)

    exporter.share(2)
    assert exporter.ask("next 2") == "kept"
    assert mapping.follow() == 2 and has(arrays, 2) and mapping.follow() is None
    exporter.close(1)  # No lease is left on it.

    exporter.share(3, 4, 999)
    assert exporter.ask("next 3") == "kept"
    with pytest.raises(device_ipc.LayoutError, match="999"):
        mapping.follow()
    assert has(arrays, 2)
    exporter.share(4)
    assert exporter.ask("next 4") == "kept"
    assert mapping.follow(stream=device_ipc.Stream("mock:0")) == 4 and has(arrays, 4)

    mapping.suspend()
    with pytest.raises(device_ipc.Error, match="suspended"):
        mapping.follow()
    mapping.resume(f"keeper:{name}")
    assert has(arrays, 4)

    exporter.process.kill()
    exporter.process.wait(60)
    with pytest.raises(device_ipc.TimeoutError, match="^no process listens"):
        mapping.follow()
    assert has(arrays, 4)
    exporter = Exporter(start)
    exporter.share(7)
    assert exporter.ask(f"keep 7 {name}") == "kept"
    assert mapping.follow() == 1 and has(arrays, 7) and address(arrays["b"]) == place

    mapping = device_ipc.open(exporter.share(8), reserved=True)
    with pytest.raises(device_ipc.UnsupportedError, match="no keeper"):
        mapping.follow()
    mapping.replace(f"keeper:{name}")
    assert mapping.follow() is None
    with pytest.raises(device_ipc.UnsupportedError, match="not reserved"):
        device_ipc.open(f"keeper:{name}").follow()
    with pytest.raises(device_ipc.GoneError):
        mapping.replace(first)


def test_grant_opens_the_next_version_of_a_dropped_export(start: Start) -> None:
    exporter = Exporter(start)
    arrays = device_ipc.numpy.open(exporter.share(1), reserved=True)
    second, third = exporter.share(2), exporter.share(3)
    grants = [exporter.ask(f"grant {version}") for version in (2, 3)]
    for version in (2, 3):
        assert exporter.ask(f"drop {version}") == "dropped"
    with pytest.raises(device_ipc.StaleError):
        arrays.mapping.replace(second)
    arrays.mapping.replace(second, grant=grants[0])
    assert has(arrays, 2)
    arrays.mapping.suspend()
    arrays.mapping.resume(third, grant=device_ipc.Grant(grants[1]))
    assert has(arrays, 3)
    with pytest.raises(ValueError, match="without grant"):
        arrays.mapping.replace("keeper:any", grant=grants[0])


def test_mapping_without_reserved_addresses_is_refused(start: Start) -> None:
    exporter = Exporter(start)
    text = exporter.share(1)
    arrays = device_ipc.numpy.open(text)
    assert not arrays.mapping.is_suspended
    for call in (arrays.mapping.suspend, lambda: arrays.mapping.resume(text), lambda: arrays.mapping.replace(text)):
        with pytest.raises(device_ipc.UnsupportedError, match="not reserved"):
            call()
    assert has(arrays, 1)
    with pytest.raises(device_ipc.UnsupportedError, match="copy"):
        device_ipc.open(text, reserved=True, copy="staged")
    with device_ipc.share(device_ipc.empty((4,), "float32", "mock:0", read_only=True)) as own:
        with pytest.raises(device_ipc.UnsupportedError):
            device_ipc.open(str(own), reserved=True)


def test_suspended_mapping_is_closed(start: Start) -> None:
    exporter = Exporter(start)
    text = exporter.share(1)
    with device_ipc.numpy.open(text, reserved=True) as arrays:
        arrays.mapping.suspend()
        exporter.close(1)
    for call in (arrays.mapping.suspend, lambda: arrays.mapping.resume(text), lambda: arrays.mapping.replace(text)):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(ValueError, match="closed"):
        arrays.mapping.is_suspended  # noqa: B018


def test_read_of_suspended_memory_ends_the_process(start: Start) -> None:
    exporter = Exporter(start)
    reader = start(
        """
        import device_ipc.numpy, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        arrays = device_ipc.numpy.open(sys.argv[1], reserved=True)
        arrays.mapping.suspend()
        print("suspended")
        arrays["a"].sum()
        """,
        exporter.share(1),
    )
    assert reader.stdout is not None and reader.stdout.readline() == "suspended\n"
    assert reader.wait(timeout=60) in (-signal.SIGSEGV, -signal.SIGBUS)


def test_callbacks_and_signal_handlers_do_not_wait_for_an_exchange(start: Start) -> None:
    first, stopped = Exporter(start), Exporter(start)
    mapping = device_ipc.open(first.share(1), reserved=True, timeout=None)
    text = stopped.share(2)
    refused = threading.Event()

    def on_dropped() -> None:
        with pytest.raises(RuntimeError, match="callback"):
            mapping["a"]
        refused.set()

    mapping.on_dropped(on_dropped)
    values: "list[float]" = []
    reader = threading.Thread(target=lambda: values.append(float(np.from_dlpack(mapping["a"]).sum())))

    def on_alarm(*_: object) -> None:
        try:
            mapping["a"]
        except RuntimeError:
            pass
        else:
            return  # The exchange has not begun.
        signal.setitimer(signal.ITIMER_REAL, 0)
        reader.start()
        assert first.ask("drop 1") == "dropped"
        assert refused.wait(60)
        os.kill(stopped.process.pid, signal.SIGCONT)

    former = signal.signal(signal.SIGALRM, on_alarm)
    suspend(stopped.process)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        mapping.replace(text)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        os.kill(stopped.process.pid, signal.SIGCONT)
    reader.join(60)
    assert refused.is_set() and values == [8.0]

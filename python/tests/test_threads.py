"""Many threads that use one object."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import device_ipc
from conftest import Start, unique
from test_share import finish, line, ones

THREADS = 16


def together(work: "Callable[[int], None]") -> None:
    """Runs a function in several threads, which begin at the same time, and raises what one of them raises."""
    failed: list[BaseException] = []
    begin = threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            begin.wait(60)
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


def test_one_mapping_is_read_and_closed_by_many_threads() -> None:
    export = device_ipc.share({str(number): ones(number + 1) for number in range(THREADS)})
    for _ in range(20):
        mapping = device_ipc.open(export.descriptor)

        def work(number: int, mapping: device_ipc.Mapping = mapping) -> None:
            try:
                array = np.from_dlpack(mapping[str(number)])
                assert array.shape == (number + 1,)
                assert len(mapping.regions) >= 1
            except ValueError as error:
                assert "closed" in str(error)
            if number % 4 == 0:
                mapping.close()

        together(work)
        assert mapping.closed
    export.close(timeout=30)


def test_one_export_is_closed_once() -> None:
    export = device_ipc.share(ones(4))

    def work(_number: int) -> None:
        try:
            export.close(timeout=30)
        except ValueError as error:
            assert "another thread" in str(error)

    together(work)
    assert export.closed


def test_one_channel_carries_the_messages_of_many_threads() -> None:
    here: list[device_ipc.Channel] = []
    with device_ipc.listen(unique("python-threads")) as listener:
        connecting = threading.Thread(target=lambda: here.append(device_ipc.connect(unique("python-threads"))))
        connecting.start()
        there = listener.accept(timeout=30)
        connecting.join(60)
    channel, each = here[0], 50
    received: list[tuple[int, int]] = []

    def work(number: int) -> None:
        if number % 2:
            for step in range(each):
                channel.send(bytes([number, step]), ones(2), timeout=60)
        else:
            for _ in range(each):
                message = there.receive(timeout=60)
                with message.open() as mapping:
                    assert mapping.nbytes == 8
                received.append((message.data[0], message.data[1]))

    together(work)
    assert sorted(received) == [(number, step) for number in range(1, THREADS, 2) for step in range(each)]


def test_types_have_no_settable_attributes() -> None:
    for shared in [ones(4), device_ipc.share(ones(4)), device_ipc.Stream("mock:0"), *device_ipc.devices()]:
        with pytest.raises(AttributeError):
            shared.anything = 1  # type: ignore[attr-defined]


def test_threads_take_turns_to_write_a_ring() -> None:
    slots, each = 3, 100
    ring = device_ipc.Ring(device_ipc.empty((slots, 256), "uint8"), slots=slots)
    reader = device_ipc.join(str(ring))
    torn: list[list[int]] = []
    seen: list[int] = []

    def read() -> None:
        for slot in reader:
            with slot:
                values = sorted(set(np.from_dlpack(slot.tensor).tolist()))
                seen.append(values[0])
                if len(values) > 1:
                    torn.append(values)
        reader.close()

    def write(number: int) -> None:
        for _ in range(each):
            with ring.write(timeout=60) as slot:
                array = np.from_dlpack(slot.tensor)
                # In two steps, between which another thread could write.
                array[:128] = number
                time.sleep(0)
                array[128:] = number

    reading = threading.Thread(target=read)
    reading.start()
    together(write)
    ring.close(timeout=60)
    reading.join(60)
    assert not reading.is_alive() and not torn
    assert len(seen) == THREADS * each and set(seen) == set(range(THREADS))


def test_write_beside_a_slot_of_this_thread_raises() -> None:
    ring = device_ipc.Ring(device_ipc.empty((2, 256), "uint8"))
    slot = ring.write()
    with pytest.raises(ValueError, match="this thread is writing"):
        ring.write(timeout=10)
    failed: list[BaseException] = []

    def other() -> None:
        try:
            ring.write(timeout=0.1)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert isinstance(failed[0], device_ipc.TimeoutError) and "being written" in str(failed[0])
    slot.publish()
    ring.write(timeout=10).publish()
    ring.close()


def test_threads_share_the_slots_of_a_reader() -> None:
    slots, count = 4, 400
    ring = device_ipc.Ring(device_ipc.empty((slots, 256), "uint8"), slots=slots)
    reader = device_ipc.join(str(ring))
    seen: list[int] = []

    def write() -> None:
        for _ in range(count):
            with ring.write(timeout=60):
                pass
        ring.close(timeout=60)

    def read(number: int) -> None:
        while (slot := reader.next(60)) is not None:
            with slot:
                # Some threads hold a slot while others take several.
                time.sleep(0.001 if number % 4 == 0 else 0)
                seen.append(slot.sequence)

    writing = threading.Thread(target=write)
    writing.start()
    together(read)
    reader.close()
    writing.join(60)
    assert not writing.is_alive()
    assert sorted(seen) == list(range(count))


def test_thread_with_all_slots_of_a_reader_gets_an_error() -> None:
    ring = device_ipc.Ring(device_ipc.empty((2, 256), "uint8"))
    reader = device_ipc.join(str(ring))
    ring.write().publish()
    ring.write().publish()
    taken = [reader.next(10), reader.next(10)]
    with pytest.raises(device_ipc.Error, match="holds all 2 slots"):
        reader.next(10)
    del taken


def test_each_replacement_of_many_threads_has_a_version() -> None:
    keeper = device_ipc.keep(unique("python-threads-keeper"), device_ipc.share(ones(4)))
    exports = [device_ipc.share(ones(4)) for _ in range(THREADS)]
    together(lambda number: keeper.replace(exports[number]))
    assert keeper.version == 1 + THREADS
    keeper.close()


def waits() -> "dict[str, tuple[Callable[[], object], Callable[[], object]]]":
    """Returns a wait for an object, and the call that closes the object, for each class that has both."""
    export = device_ipc.share(ones(4))
    listener = device_ipc.listen(unique("python-close-ends-waits"))
    ring = device_ipc.Ring(device_ipc.empty((2, 256), "uint8"))
    full = device_ipc.Ring(device_ipc.empty((1, 256), "uint8"), slots=1)
    slow = device_ipc.join(str(full))
    full.write().publish()
    reader = device_ipc.join(str(ring))

    def close_full() -> None:
        with pytest.raises(device_ipc.StillHeldError):
            full.close(timeout=0)
        slow.close()

    return {
        "accept": (listener.accept, listener.close),
        "wait_opened": (export.wait_opened, lambda: export.close(timeout=30)),
        "next": (reader.next, reader.close),
        "wait_readers": (lambda: ring.wait_readers(5), lambda: ring.close(timeout=30)),
        "write": (full.write, close_full),
    }


def test_close_ends_the_waits_of_other_threads() -> None:
    for name, (wait, close) in waits().items():
        ended: list[BaseException] = []
        begun = threading.Event()

        def run(wait: Callable[[], object] = wait, begun: threading.Event = begun) -> None:
            begun.set()
            try:
                wait()
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait(60)
        close()
        thread.join(60)
        assert not thread.is_alive(), name
        assert isinstance(ended[0], ValueError) and "closed" in str(ended[0]), (name, ended)


def test_name_of_a_closed_listener_is_free_at_once() -> None:
    for _ in range(5):
        listener = device_ipc.listen(unique("python-free-at-once"))
        thread = threading.Thread(target=lambda: pytest.raises(ValueError, listener.accept))
        thread.start()
        listener.close()
        thread.join(60)
        assert not thread.is_alive()


def test_open_of_open_memory_waits_for_no_other_thread(start: Start) -> None:
    export = device_ipc.share(ones(4))
    other = start(
        """
        import resource

        def waits():
            return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

        with d.open(sys.argv[1]) as mapping:
            before = waits()
            for _ in range(100):
                with d.open(sys.argv[1]):
                    pass
            assert waits() - before < 50, waits() - before
        print("done", flush=True)
        """,
        str(export),
    )
    assert line(other) == "done"
    finish(other)

"""Many threads that use one object."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

import device_ipc
from test_share import ones

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
    with device_ipc.listen("python-threads") as listener:
        connecting = threading.Thread(target=lambda: here.append(device_ipc.connect("python-threads")))
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

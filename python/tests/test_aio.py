"""Waits of asyncio. No test lets a thread of the event loop block on another process."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import device_ipc
from conftest import Start, suspend, unique
from device_ipc import aio
from test_share import finish, line, ones, tell

# Of messages of the long run.
MESSAGES = int(os.environ.get("DEVICE_IPC_TEST_MESSAGES", "2500"))

SECONDS = 60


def run(main: "Callable[[], Coroutine[Any, Any, None]]") -> None:
    """Runs a program of asyncio, which must leave no waiting task."""

    async def limited() -> None:
        await asyncio.wait_for(main(), 200)
        assert not aio._queues

    asyncio.run(limited())


async def pair(name: str) -> "tuple[device_ipc.Channel, device_ipc.Channel]":
    """Returns both ends of a channel in this process."""
    with device_ipc.listen(name) as listener:
        accepting = asyncio.create_task(aio.accept(listener, SECONDS))
        connected = await aio.call(device_ipc.connect, name)
        return connected, await accepting


async def settle() -> None:
    """Lets the tasks that can run begin to wait."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_every_wait_between_two_processes(start: Start) -> None:
    async def main() -> None:
        listener = device_ipc.listen(unique("python-aio"))
        ring = device_ipc.Ring(device_ipc.empty((2048,), "uint8", "mock:0"))
        export = device_ipc.share(ones(4))
        other = start(
            """
            channel = d.connect(unique("python-aio"))
            channel.send(b"hello")
            reader = d.join(sys.argv[1])
            with d.open(sys.argv[2]) as mapping:
                for slot in reader:
                    with slot:
                        channel.send(bytes(np.from_dlpack(slot)[:1]))
                sys.stdin.readline()
            """,
            str(ring),
            str(export),
        )
        channel = await aio.accept(listener, SECONDS)
        assert (await aio.receive(channel, SECONDS)).data == b"hello"
        await aio.readers(ring, 1, SECONDS)
        await aio.opened(export, 1, SECONDS)
        for number in range(100):  # the ring has two slots: the writer waits for the reader
            with await aio.write(ring, timeout=SECONDS) as slot:
                np.from_dlpack(slot)[:] = number
            assert (await aio.receive(channel, SECONDS)).data == bytes([number])
        with pytest.raises(device_ipc.StillHeldError) as held:
            await aio.released(export, 0.05)
        assert held.value.holders[0].pid == other.pid
        releasing = asyncio.create_task(aio.released(export, SECONDS))
        await settle()
        export.holders()  # takes no notification from the task
        closing = asyncio.create_task(aio.call(ring.close, SECONDS))
        tell(other, "end")
        await asyncio.gather(releasing, closing)
        finish(other)

    run(main)


def test_reader_waits_for_publications_and_the_end_of_the_ring() -> None:
    async def main() -> None:
        ring = device_ipc.Ring(device_ipc.empty((2048,), "uint8", "mock:0"))
        reader = await aio.call(device_ipc.join, str(ring))
        reading = asyncio.create_task(aio.next(reader, SECONDS))
        await settle()
        assert not reading.done()
        with ring.write() as slot:
            pass
        received = await reading
        assert received is not None and received.sequence == slot.sequence
        received.release()
        ending = asyncio.create_task(aio.next(reader, SECONDS))
        await settle()
        closing = asyncio.create_task(aio.call(ring.close, SECONDS))
        assert await ending is None
        reader.close()
        await closing

    run(main)


def test_writer_waits_for_the_release_of_a_slot() -> None:
    async def main() -> None:
        ring = device_ipc.Ring(device_ipc.empty((2048,), "uint8", "mock:0"), slots=1)
        reader = device_ipc.join(str(ring))
        with await aio.write(ring):
            with pytest.raises(ValueError, match="this task is writing"):
                await aio.write(ring)
        read = reader.next(SECONDS)
        assert read is not None
        with pytest.raises(device_ipc.TimeoutError, match="50 ms"):
            await aio.write(ring, timeout=0.05)
        writing = asyncio.create_task(aio.write(ring, timeout=SECONDS))
        await settle()
        read.release()
        assert (await writing).sequence == 1
        reader.close()

    run(main)


def test_tasks_and_threads_take_turns_to_write() -> None:
    async def main() -> None:
        ring = device_ipc.Ring(device_ipc.empty((4, 256), "uint8"), slots=4)
        order: list[int] = []

        async def write(number: int) -> None:
            for _ in range(20):
                with await aio.write(ring, timeout=SECONDS):
                    order.append(number)
                    await asyncio.sleep(0)
                    assert order[-1] == number

        def write_in_a_thread() -> None:
            for _ in range(20):
                with ring.write(timeout=SECONDS):
                    order.append(8)

        thread = aio.call(write_in_a_thread)
        await asyncio.gather(*(write(number) for number in range(8)), thread)
        assert sorted(order) == sorted(list(range(9)) * 20) and ring.sequence == 180
        ring.close()

    run(main)


def test_timeout_states_the_time_and_the_wait() -> None:
    async def main() -> None:
        with device_ipc.listen(unique("python-aio-nobody")) as listener:
            with pytest.raises(device_ipc.TimeoutError, match="timed out after 50 ms: waiting for a connection"):
                await aio.accept(listener, 0.05)
            with pytest.raises(device_ipc.TimeoutError, match=" 0 ms"):
                await aio.accept(listener, 0)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(aio.accept(listener), 0.05)

    run(main)


def test_cancellation_loses_no_message() -> None:
    async def main() -> None:
        here, there = await pair(unique("python-aio-cancel"))
        received = []
        for number in range(200):
            receiving = [asyncio.create_task(aio.receive(there)) for _ in range(3)]
            await settle()
            await aio.send(here, number.to_bytes(2, "little"))
            if number % 3:
                # The first task is woken, and cancelled before it runs.
                receiving[0].cancel()
            done, rest = await asyncio.wait(receiving, return_when=asyncio.FIRST_COMPLETED, timeout=SECONDS)
            for task in rest:
                task.cancel()
            await asyncio.gather(*receiving, return_exceptions=True)
            received += [task.result().data for task in receiving if not task.cancelled()]
            if not received or received[-1] != number.to_bytes(2, "little"):
                received.append((await aio.receive(there, SECONDS)).data)
        assert received == [number.to_bytes(2, "little") for number in range(200)]

    run(main)


def test_tasks_receive_in_the_order_in_which_they_wait() -> None:
    async def main() -> None:
        here, there = await pair(unique("python-aio-order"))
        tasks = []
        for _ in range(10):
            tasks.append(asyncio.create_task(aio.receive(there, SECONDS)))
            await settle()
        tasks[4].cancel()
        for number in range(9):
            here.send(bytes([number]))
        received = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(received.pop(4), asyncio.CancelledError)
        assert [message.data[0] for message in received if isinstance(message, device_ipc.Received)] == list(range(9))

    run(main)


def test_senders_wait_for_room_and_keep_their_order() -> None:
    async def main() -> None:
        here, there = await pair(unique("python-aio-full"))
        sizes = [1 << 20 if number % 5 == 0 else 10 for number in range(200)]
        sending = [asyncio.create_task(aio.send(here, bytes(size), timeout=SECONDS)) for size in sizes]
        await settle()
        assert not sending[-1].done(), "the channel is full"
        assert [len((await aio.receive(there, SECONDS)).data) for _ in sizes] == sizes
        await asyncio.gather(*sending)

    run(main)


def test_send_shares_tensors_once_however_long_it_waits(start: Start) -> None:
    async def main() -> None:
        here, there = await pair(unique("python-aio-memory"))
        shared = device_ipc.counters()["exports_total"]
        sending = [asyncio.create_task(aio.send(here, bytes(1 << 20), ones(4), timeout=SECONDS)) for _ in range(150)]
        for _ in sending:
            message = await aio.receive(there, SECONDS)
            with await aio.call(message.open) as mapping:
                assert mapping.nbytes == 16
        await asyncio.gather(*sending)
        assert device_ipc.counters()["exports_total"] - shared == len(sending)

    run(main)


@pytest.mark.parametrize("kind", ["listener", "channel", "ring", "reader", "export"])
def test_closing_an_object_ends_its_waits(kind: str) -> None:
    async def main() -> None:
        ring = device_ipc.Ring(device_ipc.empty((2048,), "uint8", "mock:0"), slots=1)
        reader = device_ipc.join(str(ring))
        with ring.write():
            pass
        slot = None if kind == "reader" else reader.next(SECONDS)
        if kind == "reader":
            with reader.next(SECONDS) or pytest.fail("the ring is open"):
                pass
        listener = device_ipc.listen(unique("python-aio-close"))
        channel, _peer = await pair(unique("python-aio-close-channel"))
        export = device_ipc.share(ones(4))
        wait, close = {
            "listener": (aio.accept(listener), listener.close),
            "channel": (aio.receive(channel), lambda: channel.close(0)),
            "ring": (aio.write(ring), lambda: ring.__exit__(ValueError, None, None)),
            "reader": (aio.next(reader), reader.close),
            "export": (aio.released(export), export.close),
        }[kind]
        task = asyncio.create_task(wait)
        await settle()
        assert not task.done()
        close()
        with pytest.raises((ValueError, device_ipc.GoneError), match="closed"):
            await asyncio.wait_for(task, SECONDS)
        del slot

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the waits that this case does not use
        run(main)
        gc.collect()


def test_end_of_the_peer_ends_a_wait(start: Start) -> None:
    async def main() -> None:
        with device_ipc.listen(unique("python-aio-death")) as listener:
            other = start('channel = d.connect(unique("python-aio-death")); print("connected", flush=True); sys.stdin.readline()')
            channel = await aio.accept(listener, SECONDS)
        receiving = asyncio.create_task(aio.receive(channel, SECONDS))
        await settle()
        other.kill()
        with pytest.raises(device_ipc.GoneError):
            await receiving

    run(main)


def test_second_event_loop_and_waiting_threads_are_refused() -> None:
    async def main() -> None:
        here, there = await pair(unique("python-aio-loops"))
        receiving = asyncio.create_task(aio.receive(there, SECONDS))
        await settle()

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(aio.receive(there, SECONDS))

        await aio.call(elsewhere)
        await aio.send(here, b"1")
        await receiving
        ring = device_ipc.Ring(device_ipc.empty((2048,), "uint8", "mock:0"))
        reader = device_ipc.join(str(ring))
        thread = threading.Thread(target=reader.next)
        thread.start()
        with pytest.raises(RuntimeError, match="another thread waits"):
            for _ in range(10_000):
                with pytest.raises(device_ipc.TimeoutError):
                    await aio.next(reader, 0)
                await asyncio.sleep(0.001)
        with ring.write():
            pass
        await aio.call(thread.join, SECONDS)

    run(main)


def test_call_delivers_results_and_errors_and_can_be_cancelled(start: Start) -> None:
    async def main() -> None:
        with pytest.raises(device_ipc.DescriptorError):
            await aio.call(device_ipc.open, "nothing")
        other = start(
            """
            export = d.share(d.empty((4,), "uint8", "mock:0"))
            print(export, flush=True)
            sys.stdin.readline()
            """
        )
        text = line(other)
        suspend(other)
        opening = asyncio.create_task(aio.call(device_ipc.open, text, timeout=1))
        await asyncio.sleep(0.05)
        assert not opening.done(), "the loop runs while the exporter is stopped"
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        other.send_signal(signal.SIGCONT)
        with await aio.call(device_ipc.open, text) as mapping:
            assert mapping.nbytes == 4
        tell(other, "end")

    run(main)


def test_interrupt_ends_a_wait_and_a_call_and_the_process_exits(start: Start) -> None:
    export = device_ipc.share(ones(4))
    other = start(
        """
        import asyncio
        from device_ipc import aio
        async def main():
            listener = d.listen(unique("python-aio-interrupt"))
            tasks = [asyncio.create_task(aio.accept(listener)), asyncio.create_task(aio.call(d.share(d.empty((4,), "uint8", "mock:0")).wait_released))]
            await asyncio.sleep(0.1)
            print("waiting", flush=True)
            await asyncio.gather(*tasks)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
        str(export),
    )
    assert line(other) == "waiting"
    other.send_signal(signal.SIGINT)
    assert line(other) == "interrupted"
    finish(other)


SERVER = """
import asyncio
from device_ipc import aio
async def main():
    with d.listen(sys.argv[1]) as listener:
        print("listening", flush=True)
        channel = await aio.accept(listener, 60)
    while True:
        message = await aio.receive(channel, 60)
        if not message.data:
            break
        await aio.send(channel, message.data, timeout=60)
    print(d.counters()["leases"], flush=True)
asyncio.run(main())
"""


def used() -> "tuple[int, int, int]":
    """Returns this process's numbers of memory blocks of Python, descriptors and threads."""
    gc.collect()
    return sys.getallocatedblocks(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_many_messages_leave_memory_descriptors_and_threads_as_they_were(start: Start) -> None:
    async def main() -> None:
        server = start(SERVER, unique("python-aio-many"))
        assert line(server) == "listening"
        channel = await aio.call(device_ipc.connect, unique("python-aio-many"))
        before = (0, 0, 0)
        for number in range(MESSAGES):
            await aio.send(channel, b"%d" % number, timeout=SECONDS)
            assert (await aio.receive(channel, SECONDS)).data == b"%d" % number
            if number == 1000:
                before = used()
        after = used()
        # A leak adds a block for each message.
        blocks = (MESSAGES - 1000) // 10
        assert after[0] <= before[0] + blocks and after[1] <= before[1] and after[2] <= before[2], (before, after)
        await aio.send(channel, b"", timeout=SECONDS)
        await aio.call(server.wait)

    run(main)

"""``python -m device_ipc``, and the waits of asyncio."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest

import device_ipc
from conftest import Start
from device_ipc import aio
from test_share import finish, line, ones


def run(command: str) -> str:
    arguments = [sys.executable, "-m", "device_ipc", command]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120).stdout


def test_program_shows_devices_backends_and_exports() -> None:
    assert "mock:0" in run("devices") and "mock:1" in run("devices")
    assert "mock: 2 devices" in run("doctor")
    export = device_ipc.share(ones(4))
    assert f"{export.nbytes} B, mock, held by no process" in run("ps")


def test_demonstration_adds_one() -> None:
    assert "[2. 2. 2.]" in run("demo")


def test_asyncio_waits_for_a_channel_a_ring_and_a_release(start: Start) -> None:
    async def main() -> None:
        listener = device_ipc.listen("python-aio")
        memory = device_ipc.empty((2048,), "uint8", "mock:0")
        ring = device_ipc.Ring(memory)
        export = device_ipc.share(ones(4))
        other = start(
            """
            channel = d.connect("python-aio")
            channel.send(b"hello")
            reader = d.join(sys.argv[1])
            with d.open(sys.argv[2]) as mapping, reader.next() as slot:
                print(int(np.from_dlpack(slot)[0]), flush=True)
            """,
            str(ring),
            str(export),
        )
        channel = await aio.accept(listener, timeout=30)
        message = await aio.receive(channel, timeout=30)
        assert message.data == b"hello"
        await aio.readers(ring, timeout=30)
        with await aio.write(ring, timeout=30) as slot:
            np.from_dlpack(slot)[:] = 7
        assert line(other) == "7"
        await aio.released(export, timeout=30)
        finish(other)

    asyncio.run(main())


def test_asyncio_wait_times_out_and_is_cancelled() -> None:
    async def main() -> None:
        listener = device_ipc.listen("python-aio-nobody")
        with pytest.raises(device_ipc.TimeoutError):
            await aio.accept(listener, timeout=0.05)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(aio.accept(listener), 0.05)

    asyncio.run(main())

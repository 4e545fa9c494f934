"""checkpoint-engine with device_ipc.torch.install(), over memory of the mock.

The worker's code is that of checkpoint-engine's wheel, unchanged. The parameter server, which needs a process group, is this test: it
sends what ``checkpoint_engine/ps.py`` sends, in the same order. Both modules are skipped where pip cannot fetch them.
"""

import gc
import importlib
import multiprocessing
import sys
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import device_ipc
import frameworks

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import torch_over_mock as mock

VERSION, ZMQ_VERSION = "0.4.2", "27.1.0"
TIMEOUT = 100
BUCKET = 4096


def import_zmq(folder: str) -> Any:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("zmq")


def worker(folder: str, address: str, device: int, outbox: Any) -> None:
    """A worker of an engine, which keeps a copy of what it receives."""
    mock.enter()
    zmq = import_zmq(folder)
    # Without the rest of the package, which needs a web server, and a device of PyTorch's.
    package = types.ModuleType("checkpoint_engine")
    package.__path__ = [f"{folder}/checkpoint_engine"]
    nothing = lambda: None  # noqa: E731
    module = types.SimpleNamespace(synchronize=nothing, empty_cache=nothing, ipc_collect=torch.cuda.ipc_collect)
    utils: Any = types.ModuleType("checkpoint_engine.device_utils")
    utils.DeviceManager = lambda: types.SimpleNamespace(device_module=module)
    utils.npu_generate_uuid = nothing
    sys.modules.update({"checkpoint_engine": package, "checkpoint_engine.device_utils": utils})
    update: Any = importlib.import_module("checkpoint_engine.worker").update_weights_from_ipc

    received: "dict[str, list[float]]" = {}

    def run(weights: "list[tuple[str, Any]]") -> None:
        received.update({name: tensor.float().flatten().tolist() for name, tensor in weights})
        outbox.put("bucket")

    try:
        update(zmq.Context(), address, device, run=run, post_hook=lambda: outbox.put(received))
    except Exception as error:
        outbox.put(error)


class Server:
    """The parameter server of one node, with a worker process for each device."""

    def __init__(self, folder: Path, zmq: Any, addresses: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.zmq = zmq.Context()
        self.sockets, self.outboxes, self.workers = [], [], []
        for device in range(2):
            address = f"ipc://{addresses}/{device}"
            socket = self.zmq.socket(zmq.REQ)
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT * 1000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            self.sockets.append(socket)
            self.outboxes.append(context.Queue())
            arguments = (str(folder), address, device, self.outboxes[-1])
            self.workers.append(context.Process(target=worker, args=arguments, daemon=True))
            self.workers[-1].start()

    def send(self, message: Any) -> None:
        for socket in self.sockets:
            socket.send_pyobj(message)

    def replies(self) -> "list[bytes]":
        return [socket.recv() for socket in self.sockets]

    def close(self) -> None:
        for process in self.workers:
            process.kill()
            process.join(TIMEOUT)
        for socket in self.sockets:
            socket.close()
        self.zmq.term()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages."""
    unpacked = tmp_path_factory.mktemp("packages")
    for package, version in [("checkpoint-engine", VERSION), ("pyzmq", ZMQ_VERSION)]:
        with zipfile.ZipFile(frameworks.wheel(package, version)) as files:
            files.extractall(unpacked)
    return unpacked


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Server]:
    mock.enter()
    # Short: the address of a socket has 107 bytes at most.
    one = Server(folder, import_zmq(str(folder)), tmp_path)
    yield one
    one.close()
    mock.leave()


def fill(half: Any, tensors: "dict[str, Any]") -> "list[dict[str, Any]]":
    """Copies tensors to a half of the buffer; returns what checkpoint-engine says about them."""
    buffer, offset, listed = half
    for name, tensor in tensors.items():
        buffer[offset : offset + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
        listed.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset})
        offset += -(-tensor.nbytes // 256) * 256
    return list(listed)


def exports_are(expected: int) -> None:
    until = time.monotonic() + TIMEOUT
    while device_ipc.counters()["exports"] != expected:
        assert time.monotonic() < until, device_ipc.counters()
        gc.collect()
        torch.cuda.ipc_collect()
        time.sleep(0.01)


def test_workers_of_two_devices_load_all_buckets(server: Server) -> None:
    before = device_ipc.counters()["exports"]
    buffer = mock.filled(0, [2 * BUCKET], torch.uint8)
    function, arguments = mock.reduce_tensor(buffer)
    server.send((function, arguments))
    assert server.replies() == [b"", b""]
    sent: "dict[str, Any]" = {}
    for number in range(6):
        tensors = {
            f"{number}.weight": torch.arange(400, dtype=torch.float32).reshape(20, 20) + number,
            f"{number}.bias": torch.full((3, 5), number + 0.5, dtype=torch.bfloat16),
        }
        sent.update(tensors)
        metadata = fill((buffer, number % 2 * BUCKET, []), tensors)
        # The workers may still read the other half.
        if number:
            assert server.replies() == [b"", b""]
        server.send(metadata)
    assert server.replies() == [b"", b""]
    for _ in range(2):
        server.send(None)
        assert server.replies() == [b"", b""]
    expected = {name: tensor.float().flatten().tolist() for name, tensor in sent.items()}
    for outbox in server.outboxes:
        assert [outbox.get(timeout=TIMEOUT) for _ in range(6)] == ["bucket"] * 6
        assert outbox.get(timeout=TIMEOUT) == expected
    del buffer, function, arguments
    exports_are(before)


def test_killed_worker_gives_the_buffer_back(server: Server) -> None:
    before = device_ipc.counters()["exports"]
    buffer = mock.filled(0, [2 * BUCKET], torch.uint8)
    server.send(tuple(mock.reduce_tensor(buffer)))
    assert server.replies() == [b"", b""]
    server.send(fill((buffer, 0, []), {"w": torch.ones(8)}))
    for outbox in server.outboxes:
        assert outbox.get(timeout=TIMEOUT) == "bucket"
    for process in server.workers:
        process.kill()
    del buffer
    exports_are(before)


def test_handle_of_a_buffer_that_is_gone_is_an_error(server: Server) -> None:
    before = device_ipc.counters()["exports"]
    mock.leave()
    mock.enter(payload_lifetime=0.01)
    buffer = mock.filled(0, [2 * BUCKET], torch.uint8)
    handle = tuple(mock.reduce_tensor(buffer))
    del buffer
    exports_are(before)
    server.send(handle)
    assert all(b"StaleError" in reply for reply in server.replies())
    for socket in server.sockets:
        socket.send(b"")
    for outbox in server.outboxes:
        assert isinstance(outbox.get(timeout=TIMEOUT), device_ipc.StaleError)

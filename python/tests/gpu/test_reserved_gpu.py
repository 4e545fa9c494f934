"""Mappings at reserved addresses under captured CUDA graphs of PyTorch. Skipped without a device."""

import gc
from typing import Any

import pytest

import device_ipc
import device_ipc.torch as dt
from gpu.peer import Peer

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

MIB = 1 << 20
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device only")

SHARE = """
with dt.pool(block_bytes=bytes):
    tensors = {name: torch.full((bytes // 8,), version, device="cuda:0", dtype=torch.int32) for name in "ab"}
exports = globals().setdefault("exports", {})
exports[version] = d.share(tensors, access="r")
del tensors
result = str(exports[version])
"""
# Returns whether the device has the memory back.
CLOSE = """
before = torch.cuda.mem_get_info(0)[0]
exports.pop(version).close(timeout=30)
gc.collect()
torch.cuda.empty_cache()
result = torch.cuda.mem_get_info(0)[0] - before
"""


class Graph:
    """A captured graph that sums the tensors of a mapping."""

    def __init__(self, text: str, device: str = "cuda:0") -> None:
        self.device = torch.device(device)
        with torch.cuda.device(self.device):
            self.weights = dt.open(text, device=device, reserved=True, allow_read_only=True)
            self.pointers = [tensor.data_ptr() for tensor in self.weights.values()]
            self.sums = torch.zeros(2, device=device, dtype=torch.int64)
            self._capture()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._capture()

    def _capture(self) -> None:
        torch.stack([tensor.sum() for tensor in self.weights.values()], out=self.sums)

    def shows(self, version: int) -> bool:
        """Replays the graph. Returns whether each tensor has the version in all elements, at its address."""
        with torch.cuda.device(self.device):
            self.graph.replay()
            sums = self.sums.tolist()
        assert [tensor.data_ptr() for tensor in self.weights.values()] == self.pointers
        return bool(sums == [version * tensor.numel() for tensor in self.weights.values()])

    @property
    def mapping(self) -> Any:
        return self.weights.mapping


def swaps(graph: Graph, peer: Peer, nbytes: int, rounds: int) -> None:
    stream = torch.cuda.current_stream(graph.device)
    for version in range(2, rounds):
        text = peer.run(SHARE, version=version, bytes=nbytes)
        graph.mapping.replace(text, stream=stream)
        # The lease on the version before has ended, and its memory is free.
        assert peer.run(CLOSE, version=version - 1) >= nbytes
        assert graph.shows(version), version


def test_captured_graph_reads_each_version(peer: Peer) -> None:
    nbytes = 64 * MIB
    graph = Graph(peer.run(SHARE, version=1, bytes=nbytes))
    assert graph.shows(1)
    swaps(graph, peer, nbytes, 100)
    graph.mapping.suspend()
    assert peer.run(CLOSE, version=99) >= nbytes
    with pytest.raises(device_ipc.Error, match="suspended"):
        torch.from_dlpack(graph.mapping["a"])
    graph.mapping.resume(peer.run(SHARE, version=100, bytes=nbytes))
    assert graph.shows(100)


@TWO
def test_captured_graph_on_another_device(peer: Peer) -> None:
    nbytes = 64 * MIB
    graph = Graph(peer.run(SHARE, version=1, bytes=nbytes), "cuda:1")
    assert graph.shows(1)
    swaps(graph, peer, nbytes, 30)


def test_exporter_killed_between_versions(peer: Peer, other: Peer) -> None:
    graph = Graph(peer.run(SHARE, version=1, bytes=2 * MIB))
    peer.kill()
    # What was ready stays readable.
    assert graph.shows(1)
    graph.mapping.replace(other.run(SHARE, version=2, bytes=2 * MIB))
    assert graph.shows(2)
    # A version that cannot be had changes nothing.
    gone = other.run(SHARE, version=3, bytes=2 * MIB)
    other.run("exports.pop(3)")
    with pytest.raises(device_ipc.Error):
        graph.mapping.replace(gone)
    assert graph.shows(2)


def test_device_memory_stays_flat(peer: Peer) -> None:
    nbytes = 64 * MIB
    texts = [peer.run(SHARE, version=version, bytes=nbytes) for version in (1, 2)]
    graph = Graph(texts[0])
    free = []
    for number in range(1, 1000):
        graph.mapping.replace(texts[number % 2])
        assert graph.shows(number % 2 + 1)
        if number in (99, 999):
            gc.collect()
            free.append(torch.cuda.mem_get_info(0)[0])
    assert free[1] >= free[0] - MIB


def test_tensor_of_a_suspended_mapping(peer: Peer, other: Peer) -> None:
    """What PyTorch shows: an illegal address, after which the process can no longer use the device."""
    text = peer.run(SHARE, version=1, bytes=2 * MIB)
    shown = other.run(
        """
        weights = dt.open(text, device="cuda:0", reserved=True, allow_read_only=True)
        tensor = weights["a"]
        weights.mapping.suspend()
        result = []
        for _ in range(2):
            try:
                tensor.sum().item()
            except Exception as error:
                result.append(type(error).__name__ + ": " + str(error))
        """,
        text=text,
    )
    assert len(shown) == 2 and all("illegal memory access" in text for text in shown), shown

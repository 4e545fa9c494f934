"""Blocks of KV caches copied on a device, and the kernel that does it. Skipped without a device."""

import statistics
import time
from array import array
from typing import Any

import pytest

from device_ipc.torch import BlockCopy
from gpu.peer import Peer, until

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device only")

# As of an 8B model: 32 layers, blocks of 16 tokens, 8 heads, keys and values of 128.
LAYERS, BLOCKS, SHAPE = 32, 2200, (8, 16, 256)

EXPORT = """
from device_ipc._kv_cache import CacheExporter
caches = {f"layer.{i}": torch.empty((blocks, *shape), dtype=torch.bfloat16, device="cuda:0") for i in range(layers)}
for number, cache in enumerate(caches.values()):
    cache.copy_((torch.arange(blocks, device="cuda:0") % 250 + number).view(-1, 1, 1, 1).expand_as(cache))
torch.cuda.synchronize()
name = f"kv-{os.getpid()}"
exporter = CacheExporter(name, caches, blocks, {}, 1000)
result = name
"""


@pytest.mark.parametrize("dtype,shape", [("bfloat16", (8, 16, 256)), ("uint8", (3, 8)), ("uint8", (3,)), ("float32", (5, 1001)), ("float32", (1, 1, 2)), ("float16", (7, 4))])
def test_kernel_copies_exactly_the_blocks(dtype: str, shape: "tuple[int, ...]") -> None:
    # More tensors and more blocks than one kernel takes.
    of = [torch.randint(0, 100, (300, *shape), device="cuda:0").to(getattr(torch, dtype)) for _ in range(70)]
    to = [torch.zeros((320, *shape), device="cuda:0", dtype=getattr(torch, dtype)) for _ in range(70)]
    expected = [tensor.clone() for tensor in to]
    sources, destinations = list(range(299, 19, -1)), list(range(40, 320))
    copy = BlockCopy(to, of)
    copy.copy(sources, destinations)
    for expect, source in zip(expected, of, strict=True):
        expect[destinations] = source[sources]
    assert all(torch.equal(one, other) for one, other in zip(to, expected, strict=True))
    # Runs of consecutive blocks, some of one block, on a stream that is not the current one.
    sources = [*range(100), 250, 260, *range(130, 250), *range(299, 270, -1)]
    destinations = [*range(200, 300), 319, 318, *range(120), *range(180, 151, -1)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copy.copy(array("I", sources), array("I", destinations), stream.cuda_stream)
    stream.synchronize()
    for expect, source in zip(expected, of, strict=True):
        expect[destinations] = source[sources]
    assert all(torch.equal(one, other) for one, other in zip(to, expected, strict=True))
    with pytest.raises(ValueError, match="twice"):
        copy.copy([1, 2], [3, 3])


def hand_over(peer: Peer, device: str) -> None:
    from device_ipc._kv_cache import CacheImporter, pack_blocks

    name = peer.run(EXPORT, layers=LAYERS, blocks=BLOCKS, shape=list(SHAPE))
    blocks = 2300
    caches = {f"layer.{i}": torch.full((blocks, *SHAPE), -1, dtype=torch.bfloat16, device=device) for i in range(LAYERS)}
    importer = CacheImporter(caches, [list(caches)], blocks, {})
    done: "set[str]" = set()

    def poll() -> bool:
        come, failed = importer.poll() or (set(), [])
        assert not failed, failed
        done.update(come)
        return bool(done)

    for number, count in enumerate((1, 32, 256, 512), 1):
        for cache in caches.values():
            cache.fill_(-1)
        peer.run("exporter.offer(ticket, f'r{ticket}'); exporter.lend(ticket)", ticket=number)
        sources, destinations = list(range(5, 5 + count)), list(range(blocks - 1, blocks - 1 - count, -1))
        importer.load(name, [(f"d{number}", number, [(pack_blocks(sources)[2], 0, array("I", destinations).tobytes())])])
        done.clear()
        until(poll)
        assert done == {f"d{number}"}
        for layer, cache in enumerate(caches.values()):
            expected = (torch.tensor(sources, device=device) % 250 + layer).to(torch.bfloat16)
            assert (cache[destinations] == expected.view(-1, 1, 1, 1)).all()
            assert (cache[: blocks - count] == -1).all()
        until(lambda: peer.run("result = sorted(exporter.returned())") == [f"r{number}"])
    importer.close()


def test_blocks_of_another_process(peer: Peer) -> None:
    hand_over(peer, "cuda:0")


@TWO
def test_blocks_of_another_device(peer: Peer) -> None:
    hand_over(peer, "cuda:1")


def test_figures_of_a_copy(peer: Peer) -> None:
    """Prints the rate of copies from another process's cache, beside one contiguous copy of as many bytes."""
    import device_ipc.torch as dt

    texts = peer.run(EXPORT + "export = d.share(caches); result = str(export)", layers=LAYERS, blocks=BLOCKS, shape=list(SHAPE))
    sources = dt.open(texts, device="cuda:0")
    caches = [torch.empty((BLOCKS, *SHAPE), dtype=torch.bfloat16, device="cuda:0") for _ in range(LAYERS)]
    copy = BlockCopy(caches, list(sources.values()))
    generator = torch.Generator().manual_seed(1)
    for tokens in (512, 4096, 32768):
        count = tokens // 16
        at = array("I", torch.randperm(BLOCKS, generator=generator)[:count].tolist())
        to = array("I", torch.randperm(BLOCKS, generator=generator)[:count].tolist())
        nbytes = count * LAYERS * caches[0][0].nbytes
        flat = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda:0")
        times: "dict[str, list[float]]" = {"blocks": [], "one copy": [], "host": []}
        for _ in range(30):
            for what in ("blocks", "one copy"):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                begun = time.perf_counter()
                begin.record()
                copy.copy(at, to) if what == "blocks" else flat[0].copy_(flat[1])
                end.record()
                if what == "blocks":
                    times["host"].append((time.perf_counter() - begun) * 1e3)
                torch.cuda.synchronize()
                times[what].append(begin.elapsed_time(end))
        medians = {what: statistics.median(samples[5:]) for what, samples in times.items()}
        print(
            f"\n{tokens} tokens, {nbytes / 1e6:.0f} MB: blocks {medians['blocks']:.3f} ms ({nbytes / medians['blocks'] / 1e9:.2f} TB/s), "
            f"one copy {medians['one copy']:.3f} ms, ratio {medians['one copy'] / medians['blocks']:.2f}, host {medians['host'] * 1e3:.0f} µs"
        )

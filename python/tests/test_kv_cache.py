"""Blocks of KV caches that one process computes and another one copies, as engines do, without an engine."""

import concurrent.futures
import functools
import random
import signal
import subprocess
import threading
import time
import uuid
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Gate, Start, suspend

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

from device_ipc._blocks import BlockCopy  # noqa: E402
from device_ipc._kv_cache import CacheExporter, CacheImporter, Load, block_views  # noqa: E402

BLOCKS = 8
FACTS = {"model": "m", "tokens of a block": 4}
LIMIT = 120

EXPORTER = """
import json, torch
from device_ipc._kv_cache import CacheExporter
BLOCKS, FACTS = 8, {"model": "m", "tokens of a block": 4}
caches = {f"layer.{i}": torch.from_dlpack(d.empty((BLOCKS, 2, 4, 8), "float32", "mock:0")) for i in range(3)}
for number, cache in enumerate(caches.values()):
    for block in range(BLOCKS):
        cache[block] = 100 * number + block
exporter = CacheExporter(sys.argv[1], caches, BLOCKS, FACTS, limit=float(sys.argv[2]))
print("ready")
for line in sys.stdin:
    what, *names = line.split()
    if what in ("offer", "lend"):
        for name in names:
            exporter.offer(ord(name), name)
            if what == "lend":
                exporter.lend(ord(name))
        print("[]")
    elif what == "returned":
        print(json.dumps(sorted(exporter.returned())))
    elif what == "close":
        exporter.close()
        print("[]")
"""


class Exporter:
    """A process whose requests have letters as names, which are their tickets too."""

    def __init__(self, start: Start, limit: float = 1000, name: "str | None" = None) -> None:
        self.name = name or f"kv-test-{uuid.uuid4().hex}"
        self.process: "subprocess.Popen[str]" = start(EXPORTER, self.name, str(limit))
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def ask(self, *words: str) -> "list[str]":
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return list(eval(self.process.stdout.readline()))

    def returns(self) -> "list[str]":
        """Waits until blocks were returned."""
        found: "list[str]" = []

        def ask() -> bool:
            found.extend(self.ask("returned"))
            return bool(found)

        until(ask)
        return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def text_of(numbers: "list[int]") -> str:
    """Returns the text of block numbers, with a run for each one."""
    return "".join(f"{number:08x}00000001" for number in numbers)


def load(name: str, remote: str, sources: "list[int]", destinations: "list[int]") -> Load:
    return name, ord(remote), [(text_of(sources), 0, array("I", destinations).tobytes())]


def importer_of(caches: "dict[str, Any]", blocks: int = BLOCKS, facts: "dict[str, Any]" = FACTS) -> CacheImporter:
    return CacheImporter(caches, [list(caches)], blocks, facts)


def empty_caches(blocks: int = BLOCKS) -> "dict[str, Any]":
    return {f"layer.{i}": torch.full((blocks, 2, 4, 8), -1.0) for i in range(3)}


def loaded(importer: CacheImporter) -> "tuple[set[str], list[tuple[Load, str]]]":
    """Polls until a load has ended."""
    done: "set[str]" = set()
    failed: "list[tuple[Load, str]]" = []

    def poll() -> bool:
        come, lost = importer.poll() or (set(), [])
        done.update(come)
        failed.extend(lost)
        return bool(done or failed)

    until(poll)
    return done, failed


def is_claimed(importer: CacheImporter, peer: Any) -> bool:
    """Returns whether the connection is ready, and what was asked for is claimed."""
    assert importer.poll() in (None, (set(), []))
    return peer._reader is not None and not peer._changes


def test_blocks_are_copied_and_returned(start: Start) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a", "b", "c")
    caches = empty_caches(blocks=20)
    importer = importer_of(caches, 20)
    importer.load(exporter.name, [load("x", "a", [1, 5, 2], [17, 0, 3])])
    assert loaded(importer) == ({"x"}, [])
    for number, cache in enumerate(caches.values()):
        assert [cache[block].unique().tolist() for block in (17, 0, 3)] == [[100 * number + block] for block in (1, 5, 2)]
        assert cache.ne(-1).sum() == 3 * cache[0].numel()
    assert exporter.returns() == ["a"]
    # One mapping serves all requests.
    before = device_ipc.counters()["driver_opens_total"]
    importer.load(exporter.name, [load("y", "b", [0], [1])])
    assert loaded(importer) == ({"y"}, []) and exporter.returns() == ["b"]
    assert device_ipc.counters()["driver_opens_total"] == before
    importer.release(exporter.name, ord("c"))
    found: "list[str]" = []

    def is_returned() -> bool:
        assert importer.poll() in (None, (set(), []))
        found.extend(exporter.ask("returned"))
        return bool(found)

    until(is_returned)
    assert found == ["c"]
    importer.close()
    exporter.ask("close")


def test_blocks_that_are_gone(start: Start) -> None:
    exporter = Exporter(start, limit=0)
    exporter.ask("lend", "l")
    assert exporter.returns() == ["l"]
    importer = importer_of(empty_caches())
    importer.load(exporter.name, [load("x", "l", [1], [1])])
    done, failed = loaded(importer)
    assert not done and [load[0] for load, _ in failed] == ["x"] and "no longer" in failed[0][1]
    importer.close()


IMPORTER = """
import torch
from array import array
from device_ipc._kv_cache import CacheImporter
name, step = sys.argv[1:]
caches = {f"layer.{i}": torch.zeros(8, 2, 4, 8) for i in range(3)}
importer = CacheImporter(caches, [list(caches)], 8, {"model": "m", "tokens of a block": 4})

def until(condition):
    while not condition():
        importer.poll()

importer.claim(name, ord("a" if step == "claimed" else "z"))
peer = importer._peers[name]
until(lambda: peer._reader is not None and not peer._changes)
if step in ("copied", "read"):
    importer.load(name, [("x", ord("a"), [(f"{1:08x}{1:08x}", 0, array("I", [2]).tobytes())])])
    assert (caches["layer.1"][2] == 101).all()
if step == "read":
    until(lambda: not peer.running)
print("there")
sys.stdin.readline()
"""


@pytest.mark.parametrize("step", ["connected", "claimed", "copied", "read"])
def test_importer_killed_at_a_step_returns_the_blocks(start: Start, step: str) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a", "b")
    victim = start(IMPORTER, exporter.name, step)
    assert victim.stdout is not None and victim.stdout.readline() == "there\n"
    if step == "claimed":
        assert exporter.ask("returned") == []
    victim.kill()
    victim.wait(LIMIT)
    # What it has not claimed stays for others.
    if step != "connected":
        assert exporter.returns() == ["a"]
    importer = importer_of(empty_caches())
    importer.load(exporter.name, [load("y", "a" if step == "connected" else "b", [1], [1])])
    assert loaded(importer) == ({"y"}, [])
    importer.close()


def test_claimed_blocks_stay_after_the_limit(start: Start) -> None:
    exporter = Exporter(start, limit=0)
    exporter.ask("offer", "a", "b")
    importer = importer_of(empty_caches())
    importer.claim(exporter.name, ord("a"))
    peer = importer._peers[exporter.name]
    until(lambda: is_claimed(importer, peer))
    exporter.ask("lend", "a", "b")
    assert exporter.returns() == ["b"]
    assert exporter.ask("returned") == []
    importer.load(exporter.name, [load("x", "a", [1], [1])])
    assert loaded(importer) == ({"x"}, []) and exporter.returns() == ["a"]
    importer.close()


@pytest.mark.parametrize("step", ["connected", "claimed", "copied", "read"])
def test_exporter_killed_at_a_step_fails_the_load(start: Start, step: str) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a")
    importer = importer_of(empty_caches())
    importer.claim(exporter.name, ord("a" if step == "claimed" else "z"))
    peer = importer._peers[exporter.name]
    until(lambda: is_claimed(importer, peer))
    if step == "read":
        importer.load(exporter.name, [load("x", "a", [1], [1])])
        assert loaded(importer) == ({"x"}, [])
    if step == "copied":
        importer.load(exporter.name, [load("x", "a", [1], [1])])
        assert (importer.views["layer.2"][0][1] == 201).all()
    exporter.process.kill()
    exporter.process.wait(LIMIT)
    if step != "copied":
        importer.load(exporter.name, [load("x", "a", [1], [1])])
    done, failed = loaded(importer)
    assert not done and [load[0] for load, _ in failed] == ["x"]
    # The next one of this name is found.
    exporter = Exporter(start, name=exporter.name)
    exporter.ask("lend", "a")
    importer.load(exporter.name, [load("y", "a", [1], [1])])
    assert loaded(importer) == ({"y"}, []) and exporter.returns() == ["a"]
    importer.close()


def test_exporter_that_is_stopped_delays_no_load(start: Start) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a", "b")
    importer = importer_of(empty_caches())
    importer.load(exporter.name, [load("x", "a", [1], [1])])
    assert loaded(importer) == ({"x"}, [])
    suspend(exporter.process)
    importer.load(exporter.name, [load("y", "b", [1], [1])])
    assert importer.poll() == ({"y"}, [])
    exporter.process.send_signal(signal.SIGCONT)
    assert sorted(exporter.returns() + exporter.ask("returned")) == ["a", "b"]
    importer.close()


def test_blocks_of_two_importers_stay_until_both_have_read(start: Start) -> None:
    exporter = Exporter(start, limit=0)
    exporter.ask("offer", "a")
    importers = [importer_of(empty_caches()) for _ in range(2)]
    for importer in importers:
        importer.claim(exporter.name, ord("a"))
        peer = importer._peers[exporter.name]
        until(functools.partial(is_claimed, importer, peer))
    exporter.ask("lend", "a")
    for importer, returned in zip(importers, ([], ["a"]), strict=True):
        importer.load(exporter.name, [load("x", "a", [1], [1])])
        assert loaded(importer) == ({"x"}, [])
        assert exporter.ask("returned") == returned
        importer.close()


def test_importer_without_requests_unmaps_what_a_dead_exporter_has_left(start: Start) -> None:
    # What earlier tests have closed is unmapped by a thread.
    device_ipc.close_unused()
    until(lambda: device_ipc.counters()["mapped_bytes"] == 0)
    exporter = Exporter(start)
    exporter.ask("lend", "a")
    importer = importer_of(empty_caches())
    importer.load(exporter.name, [load("x", "a", [1], [1])])
    assert loaded(importer) == ({"x"}, []) and device_ipc.counters()["mapped_bytes"] > 0
    exporter.process.kill()
    until(lambda: device_ipc.counters()["mapped_bytes"] == 0)
    until(lambda: importer.poll() == (set(), []))
    assert not importer._peers
    importer.close()


def test_exporter_that_ends_waits_for_no_importer(start: Start) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a")
    importer = importer_of(empty_caches())
    importer.load(exporter.name, [load("x", "a", [1], [1])])
    assert loaded(importer) == ({"x"}, [])
    # It looks no more, and has the memory open.
    assert exporter.ask("close") == []
    importer.load(exporter.name, [load("y", "b", [1], [1])])
    done, failed = loaded(importer)
    assert not done and [load[0] for load, _ in failed] == ["y"]
    importer.close()


def test_copy_that_cannot_be_submitted_is_not_counted(start: Start) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a")
    importer = importer_of(empty_caches())
    importer.load(exporter.name, [load("ra", "a", [1], [1])])
    assert loaded(importer) == ({"ra"}, [])
    (peer,) = importer._peers.values()
    with pytest.raises(AttributeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "_reader", object())
        importer.load(exporter.name, [load("rb", "b", [1], [1])])
    # The end of the exporter ends the connection, which waits for no copy.
    exporter.process.kill()

    def is_forgotten() -> bool:
        importer.poll()
        return not importer._peers

    until(is_forgotten)
    importer.close()


def test_importer_beyond_the_room_of_the_table_is_told_so(start: Start) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a", "b")
    others = [importer_of(empty_caches()) for _ in range(46)]
    for other in others:
        other.load(exporter.name, [load("x", "a", [1], [1])])
        assert loaded(other) == ({"x"}, []), "the exporter does not look at what was released"
    last = importer_of(empty_caches())
    last.load(exporter.name, [load("y", "b", [1], [1])])
    _, failed = loaded(last)
    assert "another importer" in failed[0][1] and "46" in failed[0][1]
    others.pop().close()

    def is_admitted() -> bool:
        last.load(exporter.name, [load("y", "b", [1], [1])])
        return loaded(last)[0] == {"y"}

    until(is_admitted)
    for one in [*others, last]:
        one.close()


def test_differences_are_named(start: Start) -> None:
    exporter = Exporter(start)
    exporter.ask("lend", "a", "b")
    importer = importer_of(empty_caches(), facts={**FACTS, "tokens of a block": 16})
    importer.load(exporter.name, [load("x", "a", [1], [1])])
    _, failed = loaded(importer)
    assert "tokens of a block: 4 there and 16 here" in failed[0][1]
    importer.close()
    caches = {name: cache.to(torch.float16) for name, cache in empty_caches().items()}
    importer = importer_of(caches)
    importer.load(exporter.name, [load("x", "b", [1], [1])])
    _, failed = loaded(importer)
    assert "element type" in failed[0][1]
    importer.close()


def test_blocks_of_kernels_are_parts_of_blocks() -> None:
    cache = torch.arange(6 * 4).view(6, 4)
    (view,) = block_views(cache, 3)
    assert view.shape == (3, 2, 4) and view[1].flatten().tolist() == list(range(8, 16))
    keys, values = block_views(torch.zeros(2, 6, 4), 3)
    assert keys.shape == values.shape == (3, 2, 4)
    with pytest.raises(device_ipc.LayoutError, match="axis"):
        block_views(torch.zeros(5, 7), 3)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16", "bool", "float64"])
def test_blocks_of_any_element_type_are_copied(dtype: str) -> None:
    def tensor(blocks: int) -> Any:
        nbytes = 3 * getattr(torch, dtype).itemsize
        return torch.randint(0, 2, (blocks * nbytes,), dtype=torch.uint8).view(getattr(torch, dtype)).view(blocks, 3)

    of, to = tensor(4), tensor(5)
    expected = to.view(torch.uint8).clone()
    expected[[4, 1]] = of.view(torch.uint8)[[0, 3]]
    BlockCopy([to], [of]).copy([0, 3], [4, 1])
    assert torch.equal(to.view(torch.uint8), expected)


def test_copies_of_permuted_blocks() -> None:
    # Heads before tokens in memory, as engines ask for it.
    of = torch.arange(4 * 2 * 3 * 8, dtype=torch.bfloat16).view(4, 2, 3, 8).permute(0, 2, 1, 3)
    to = torch.zeros(6, 2, 3, 8, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    copy = BlockCopy([to], [of])
    copy.copy([3, 0], [1, 5])
    assert torch.equal(to[1], of[3]) and torch.equal(to[5], of[0]) and not to[[0, 2, 3, 4]].any()
    copy.copy([], [])
    with pytest.raises(IndexError, match="block 4"):
        copy.copy([0, 4], [0, 1])
    with pytest.raises(IndexError, match="destination block -1"):
        copy.copy([0], array("i", [-1]))
    with pytest.raises(ValueError, match="as many"):
        copy.copy([0, 1], [0])
    with pytest.raises(ValueError, match="block 5 is named as a destination twice"):
        copy.copy(array("I", [3, 1, 0]), array("I", [5, 2, 5]))
    with pytest.raises(ValueError, match="strides"):
        BlockCopy([to], [of.contiguous()])
    with pytest.raises(ValueError, match="one piece"):
        BlockCopy([to[..., :4]], [of[..., :4]])
    with pytest.raises(ValueError, match="shape"):
        BlockCopy([to], [of[:, :1]])


class Pair:
    """An exporter's table and an importer's reader in this process."""

    def __init__(self, destinations: "list[Any]", sources: "list[Any]", device: "str | None" = None) -> None:
        self._memory = destinations, sources
        native = device_ipc._native
        name = f"kv-test-{uuid.uuid4().hex}"
        with native.listen(name) as listener, concurrent.futures.ThreadPoolExecutor(1) as thread:
            connected = thread.submit(native.connect, name, existing=True)
            self.channels = [listener.accept(), connected.result()]
        self.table = native._ClaimTable()
        claims = native._Claims(self.channels[1], self.table.admit(self.channels[0]), LIMIT)
        pairs = [(place(to), place(of), to.stride(0) * to.element_size()) for to, of in zip(destinations, sources, strict=True)]
        self.queue = native._CopyQueue(device)
        self.reader = native._BlockReader(self.queue, [native._BlockCopy(device, pairs)], claims)

    def __enter__(self) -> "tuple[Any, Any]":
        return self.table, self.reader

    def __exit__(self, *error: object) -> None:
        if error == (None, None, None):
            self.queue.synchronize()
        for channel in self.channels:
            channel.close()


def place(tensor: Any) -> "tuple[int, int, int]":
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.stride(0) * tensor.element_size()


def test_reader_copies_behind_another_stream() -> None:
    def memory(value: float) -> Any:
        return torch.from_dlpack(device_ipc.empty((8, 16), "float32", "mock:0")).fill_(value)

    to, stream = [memory(0), memory(0)], device_ipc.Stream("mock:0")
    with Pair(to, [memory(1), memory(2)], "mock:0") as (table, reader):
        blocks = [([1, 2], [5, 4]), ([1], [8]), ([0, 1], [6, 6]), ([3], [7]), ([1], [])]
        texts = [text_of(sources) for sources, _ in blocks]
        parts = [[(text, 0, array("I", numbers).tobytes())] for text, (_, numbers) in zip(texts, blocks, strict=True)]
        # Texts of another process that are not as they should be.
        wrong = ["0", "0" * 16, "g" + "0" * 14 + "1", "é" * 8, "0" * 8 + "f" * 8, text_of([8]), "00000002" + "00000007", "00000001" + "fffffffd"]
        parts += [[(text, 0, array("I", [0, 2]).tobytes())] for text in wrong]
        loads: "list[Any]" = [(f"r{ticket}", ticket, part) for ticket, part in enumerate([*parts, []], 1)]
        # A call that fails releases what it has claimed.
        assert table.offer(900)
        with pytest.raises(TypeError, match="not a stream"):
            reader.submit([("r900", 900, parts[0])], object())
        assert table.released() == [900]
        for _ in range(3):
            for _, ticket, _ in loads:
                assert table.offer(ticket)
            gate = Gate(stream)
            copies = reader.submit([*loads, ("gone", 1000, parts[0])], stream)
            assert copies.query() is None and not any(tensor.any() for tensor in to) and not table.released()
            # Other threads run while one waits.
            thread = threading.Thread(target=gate.open)
            begun = time.monotonic()
            assert copies.query(0.02) is None and time.monotonic() - begun >= 0.02
            thread.start()
            failures = dict(copies.query(60) or ())
            thread.join()
            assert sorted(failures) == [1, 2, *range(5, len(loads) + 1)], failures
            assert "destination block 8" in failures[1] and "twice" in failures[2] and "no longer" in failures[len(loads)]
            assert "source block 8" in failures[10] and all("is no list" in failures[at] for at in (5, 6, 7, 8, 12)), failures
            assert sorted(table.released()) == [ticket for _, ticket, _ in loads]
            for tensor, value in zip(to, (1, 2), strict=True):
                assert tensor[[4, 5, 7]].eq(value).all() and not tensor[[0, 1, 2, 3, 6]].any()
                tensor.zero_()
        assert reader.submit([], stream).query() == []


def test_block_numbers_are_packed_as_runs() -> None:
    pack = device_ipc._native._pack_blocks
    assert pack([]) == (0, 0, "") and pack([0, 0]) == (2, 0, "")
    assert pack([0, 0, 7, 8, 9, 5, 0, 4]) == (2, 6, "00000007" "00000003" "00000005" "00000001" "00000000" "00000001" "00000004" "00000001")
    assert pack(list(range(1, 2049)) + list(range(5000, 4000, -1))) == (0, 3048, f"{1:08x}{2048:08x}{5000:08x}{(1 << 32) - 1000:08x}")
    # The blocks that a text names, from each position on.
    numbers = [3, 4, 5, 9, 8, 7, 6, 0, 1, 12]
    of, to = torch.arange(13, dtype=torch.float32).view(13, 1), torch.zeros(13, 1)
    with Pair([to], [of]) as (table, reader):
        for first in range(len(numbers)):
            for end in range(first, len(numbers) + 1):
                to.zero_()
                table.offer(1)
                destinations = array("I", range(end - first))
                assert reader.submit([("r", 1, [(pack(numbers)[2], first, destinations.tobytes())])]).query() == []
                assert to[: end - first].flatten().tolist() == numbers[first:end] and table.released() == [1]


class Block:
    """A block of an engine."""

    __slots__ = ("__weakref__", "block_id", "next")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


def test_numbers_of_block_objects_are_found() -> None:
    blocks = [Block(number) for number in range(3000)]
    others = [Block(number) for number in range(3000, 3010)]
    order = random.Random(1)
    for known in (blocks, blocks[::-1], [], blocks[100:2000], order.sample(blocks, 700)):
        pool = device_ipc._native._BlockPool(known)
        for asked in (blocks, blocks[::-1], order.sample(blocks + others, 500), [*blocks[:50], *others]):
            expected = [block.block_id for block in asked]
            zeros = int(expected[0] == 0)
            assert pool.read(asked, 0, len(asked)) == (zeros, array("I", expected[zeros:]).tobytes())
            assert pool.read(tuple(asked), 7, 20) == pool.read(asked, 7, 20) == (0, array("I", expected[7:20]).tobytes())
        assert pool.read([blocks[0], blocks[0], blocks[1]], 0, 10) == (2, array("I", [1]).tobytes())
        assert pool.read((), 0, 4) == pool.read([], 3, 1) == (0, b"")
    with pytest.raises(AttributeError):
        pool.read([object()], 0, 1)

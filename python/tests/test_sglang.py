"""device_ipc.sglang on the mock, with a worker process for each tensor-parallel rank.

The workers run SGLang's own code of the wheel between the payload and the loader, and a stand-in of it where the wheel cannot
be fetched.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.sglang as ds
import device_ipc.torch as dt
import frameworks
import sglang_worker
from conftest import Start, unique
from test_share import line

CARRIED = "0.5.17"
"""The version that `python -m engines` runs whole."""
VERSION = "0.5.23"
Group = Callable[..., "list[subprocess.Popen[str]]"]


@pytest.fixture(params=["stand-in", CARRIED, VERSION])
def version(request: pytest.FixtureRequest) -> str:
    if request.param != "stand-in":
        frameworks.wheel("sglang", request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def started() -> Iterator["dict[tuple[str, int], subprocess.Popen[str]]"]:
    """The workers of all tests, by version and rank: importing torch takes seconds."""
    started: "dict[tuple[str, int], subprocess.Popen[str]]" = {}
    yield started
    for one in started.values():
        one.kill()
        one.communicate(timeout=30)


@pytest.fixture
def workers(started: "dict[tuple[str, int], subprocess.Popen[str]]", version: str) -> Group:
    """Returns the workers of tensor-parallel ranks."""

    def take(count: int) -> "list[subprocess.Popen[str]]":
        new = []
        for rank in range(count):
            one = started.get((version, rank))
            if one is None or one.poll() is not None:
                command = [sys.executable, "-u", str(Path(sglang_worker.__file__)), version, str(rank)]
                new.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
                if one is not None:
                    one.communicate(timeout=30)
                started[version, rank] = new[-1]
        assert [answer(one) for one in new] == ["ready"] * len(new)
        return [started[version, rank] for rank in range(count)]

    return take


def answer(worker: "subprocess.Popen[str]") -> Any:
    text = line(worker)
    assert text, f"the worker has ended: {worker.poll()}"
    return json.loads(text)


def ask(worker: "subprocess.Popen[str]", payloads: "list[str]", **options: bool) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps({"payloads": payloads, **options}) + "\n")
    worker.stdin.flush()


def payloads(version: str, tensors: Any, count: int = 2) -> "list[str]":
    """Returns what Engine._serialize_tensors_per_rank and HttpServerEngineAdapter do: one payload for each rank."""
    chosen = sglang_worker.serializer(None if version == "stand-in" else version)
    return [chosen.serialize(tensors, output_str=True) for _ in range(count)]


def weights(seed: int = 0) -> "dict[str, Any]":
    """Returns a state dict in memory of the mock: several types, a transposed tensor, a parameter and one without elements."""
    torch.manual_seed(seed)
    flat = dt.empty([1 << 16], torch.uint8, "mock:0")
    flat.copy_(torch.randint(0, 255, flat.shape, dtype=torch.uint8))
    return {
        "embed.weight": flat[:4096].view(torch.bfloat16).view(32, 64),
        "layers.0.w": flat[4096:8192].view(torch.float32).view(32, 32).t(),
        "layers.0.scale": flat[8192:8256].view(torch.float8_e4m3fn),
        "layers.1.w": torch.nn.Parameter(dt.empty([8, 16], torch.float32, "mock:0").copy_(torch.rand(8, 16))),
        "none": flat[:0].view(0, 3),
    }


def digests(state: "dict[str, Any]") -> "dict[str, Any]":
    return {name: sglang_worker.digest(tensor) for name, tensor in state.items()}


def test_two_workers_load_the_bytes_of_one_state_dict(workers: Group, version: str) -> None:
    group = workers(2)
    for seed in range(3):
        state = weights(seed)
        # Pairs, as Engine.update_weights_from_tensor has them.
        with ds.share(list(state.items())) as update:
            sent = payloads(version, update.named_tensors)
            for worker in group:
                ask(worker, sent)
            assert [answer(worker) for worker in group] == [digests(state)] * 2
        assert all(export.closed for export in update.exports)


def test_each_rank_loads_its_own_state_dict(workers: Group, version: str) -> None:
    group = workers(2)
    states = [weights(1), weights(2)]
    with ds.share(*states) as update:
        sent = payloads(version, update.named_tensors)
        for worker in group:
            ask(worker, sent)
        assert [answer(worker) for worker in group] == [digests(state) for state in states]


def test_second_update_is_replayed_on_each_rank(workers: Group, version: str) -> None:
    group = workers(2)
    references = [sglang_worker.Fused(rank) for rank in range(2)]
    started = None
    for seed in range(4):
        torch.manual_seed(seed)
        # Three tensors, at other addresses in each update.
        state = {name: dt.empty([16, 16], torch.bfloat16, "mock:0").copy_(torch.rand(16, 16)) for name in ("gate", "up", "out")}
        with ds.share(state) as update:
            sent = payloads(version, update.named_tensors)
            for worker in group:
                ask(worker, sent, fused=True)
            answers = [answer(worker) for worker in group]
        for reference, (found, _) in zip(references, answers):
            reference.load_weights(state.items())
            assert found == reference.answer()[0]
        calls = [count for _, count in answers]
        started = started or calls
        assert calls == started, "load_weights is called in the first update alone"


def test_state_dicts_for_fewer_ranks_than_workers_are_refused(workers: Group, version: str) -> None:
    third = workers(3)[2]
    with ds.share(weights(1), weights(2)) as update:
        ask(third, payloads(version, update.named_tensors, 3))
        assert answer(third).startswith("ValueError: the update has descriptors for 2 tensor-parallel ranks")


def test_payload_is_read_repeatedly_and_keeps_nothing_unread(workers: Group, version: str) -> None:
    worker = workers(1)[0]
    before = device_ipc.counters()["exports"]
    state = weights()
    with ds.share(state) as update:
        sent = payloads(version, update.named_tensors)
        for _ in range(3):
            ask(worker, sent)
            assert answer(worker) == digests(state)
    unread = ds.share(state)
    payloads(version, unread.named_tensors)
    unread.close(timeout=1)
    assert device_ipc.counters()["exports"] == before
    ask(worker, sent)
    assert answer(worker).startswith("StaleError")


def test_update_ends_after_the_workers_have_released(workers: Group, version: str) -> None:
    worker = workers(1)[0]
    update = ds.share(weights())
    ask(worker, payloads(version, update.named_tensors), stops=True)
    assert answer(worker) == "loading"
    with pytest.raises(device_ipc.StillHeldError) as raised:
        update.close(timeout=0.2)
    assert [holder.pid for holder in raised.value.holders] == [worker.pid]
    # A killed worker holds nothing.
    worker.kill()
    worker.wait(timeout=30)
    update.close(timeout=30)
    assert all(export.closed for export in update.exports)


def test_error_of_the_model_reaches_the_worker_and_releases_the_tensors(workers: Group, version: str) -> None:
    worker = workers(1)[0]
    with ds.share(weights(), timeout=30) as update:
        ask(worker, payloads(version, update.named_tensors), fails=True)
        assert answer(worker) == "ValueError: the model refuses the weight"
    with ds.share(weights(3), timeout=30) as update:
        ask(worker, payloads(version, update.named_tensors))
        assert answer(worker) == digests(weights(3))


def test_exception_in_the_block_ends_the_exports_without_a_wait(workers: Group, version: str) -> None:
    worker = workers(1)[0]
    before = device_ipc.counters()["exports"]
    state = weights()
    with pytest.raises(ZeroDivisionError):
        with ds.share(state, timeout=None) as update:
            sent = payloads(version, update.named_tensors)
            ask(worker, sent, stops=True)
            assert answer(worker) == "loading"
            started = time.monotonic()
            1 / 0
    assert time.monotonic() - started < 10
    worker.kill()
    worker.wait(timeout=30)
    until = time.monotonic() + 30
    while device_ipc.counters()["exports"] != before:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_killed_trainer_is_an_error_of_the_worker(workers: Group, version: str, start: Start) -> None:
    worker = workers(1)[0]
    trainer = start(
        """
        import device_ipc.sglang as ds
        update = ds.share({"w": d.empty((4,), "float32", "mock:0")})
        print(bytes(update.named_tensors[0][1].tolist()).decode(), flush=True)
        sys.stdin.readline()
        """
    )
    sent = payloads(version, ds.named_tensors(line(trainer)))
    ask(worker, sent)
    assert list(answer(worker)) == ["w"]
    trainer.kill()
    trainer.wait(timeout=30)
    device_ipc.close_unused(30)
    ask(worker, sent)
    assert answer(worker).startswith(("GoneError", "StaleError"))


def test_weights_of_a_keeper_are_loaded_by_its_name(workers: Group, version: str) -> None:
    worker = workers(1)[0]
    memory = device_ipc.empty((64,), "float32", "mock:0", read_only=True)
    with device_ipc.keep(unique("sglang-test"), device_ipc.share({"w": memory}, access="r")):
        ask(worker, payloads(version, ds.named_tensors(f"keeper:{unique('sglang-test')}")))
        assert answer(worker)["w"][:2] == ["torch.float32", [64]]


def test_payload_contains_values_and_no_file_descriptor() -> None:
    import pickletools

    export = device_ipc.share({"w": device_ipc.empty((4,), "float32", "mock:0")})
    pickled = sglang_worker.StandInSerializer.serialize(ds.named_tensors(export.descriptor))
    used = [argument for op, argument, _ in pickletools.genops(pickled) if op.name == "SHORT_BINUNICODE"]
    assert used == ["device_ipc.0", "torch", "ByteTensor"]
    (pair,) = sglang_worker.StandInSerializer.deserialize(pickled)
    assert bytes(pair[1].tolist()).decode() == str(export.descriptor) and type(pair[1]) is torch.Tensor


def test_update_that_is_not_a_descriptor_is_refused() -> None:
    model = sglang_worker.Model()
    with pytest.raises(device_ipc.DescriptorError, match="torch.float32"):
        ds.load_weights(model, [("w", torch.ones(3))])
    with pytest.raises(device_ipc.DescriptorError, match="UTF-8"):
        ds.load_weights(model, [("w", torch.full([3], 255, dtype=torch.uint8))])
    with pytest.raises(device_ipc.DescriptorError, match="not a"):
        ds.load_weights(model, [("w", torch.tensor(list(b"hello"), dtype=torch.uint8))])
    with pytest.raises(device_ipc.DescriptorError, match="no tensor"):
        ds.load_weights(model, [])
    with pytest.raises(ValueError, match="no descriptor"):
        ds.share()
    # Without a helper: the bytes of a descriptor in any CPU tensor, under any name.
    export = device_ipc.share(weights())
    ds.load_weights(model, [("anything", torch.tensor(list(str(export).encode()), dtype=torch.uint8))])
    assert digests(model.loaded) == digests(weights())


def test_signatures_are_those_of_sglang() -> None:
    text = frameworks.source("sglang", VERSION, "sglang/srt/entrypoints/engine.py")
    signature = text[text.index("def update_weights_from_tensor(") :].split("):")[0]
    assert "named_tensors:" in signature and "load_format: Optional[str] = None" in signature
    assert "custom_loader(self.get_model(), named_tensors)" in frameworks.source("sglang", VERSION, sglang_worker.UPDATER)


def test_import_loads_neither_torch_nor_sglang() -> None:
    program = "import sys, device_ipc.sglang; assert not {'torch', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

"""device_ipc.verl on the mock: senders and receivers in processes of their own."""

import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.torch as dt
import device_ipc.verl as dv
import frameworks
import verl_modules
from conftest import Start, used, wait_used
from sglang_worker import digest
from test_share import line

VERSION = "0.9.1"
RECEIVE = """
import json, os
sys.path.insert(0, sys.argv[1])
import torch, device_ipc.verl as dv
from sglang_worker import digest
print("ready", flush=True)
buckets = []
def load(weights, is_last):
    buckets.append([[name, digest(weight)] for name, weight in weights])
    for name, weight in weights if sys.argv[3] == "change" else []:
        weight.zero_()
    assert is_last or sys.argv[3] != "stop" or print("loading", flush=True) or sys.stdin.readline()
    lasts.append(is_last)
lasts = []
try:
    dv.BucketedWeightReceiver(sys.argv[2], torch.device("cpu")).receive_weights(load)
    print(json.dumps([buckets, lasts]), flush=True)
except d.GoneError:
    print("gone", flush=True)
"""
HERE = os.path.dirname(__file__)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dv, "TIMEOUT", 60.0)


def weights(seed: int = 0) -> "list[tuple[str, Any]]":
    """Returns weights of 3.7 MiB: one larger than a bucket of 1 MiB, one without elements, one transposed."""
    torch.manual_seed(seed)
    pairs = [(f"layers.{i}", torch.rand(300, 301 + i).to(torch.bfloat16 if i % 2 else torch.float32)) for i in range(8)]
    large = dt.empty([600, 700], torch.float32, "mock:0").copy_(torch.rand(600, 700))
    pairs[4:4] = [("large", large), ("none", torch.empty(0, 3)), ("scalar", torch.tensor(3.5)), ("t", torch.rand(7, 5).t())]
    return pairs


def expected(seed: int = 0) -> "list[Any]":
    return [[name, digest(tensor)] for name, tensor in weights(seed)]


def test_two_receivers_get_the_bytes_of_their_senders(start: Start) -> None:
    handles = [f"ipc:///tmp/verl-test-{os.getpid()}-{rank}.sock" for rank in range(2)]
    receivers = [start(RECEIVE, HERE, handle, "load") for handle in handles]
    assert [line(one) for one in receivers] == ["ready"] * 2

    async def items(seed: int) -> Any:
        for pair in weights(seed):
            yield pair

    for rank, handle in enumerate(handles):
        sent = items(rank) if rank else weights(rank)
        asyncio.run(dv.BucketedWeightSender(handle, bucket_size_mb=1).async_send_weights(sent))
    for rank, receiver in enumerate(receivers):
        buckets, lasts = json.loads(line(receiver))
        assert [pair for bucket in buckets for pair in bucket] == expected(rank)
        assert len(buckets) > 4 and lasts == [False] * (len(lasts) - 1) + [True]


def test_receiver_may_change_the_tensors_of_a_bucket(start: Start) -> None:
    handle = f"ipc:///tmp/verl-test-{os.getpid()}-change"
    # Read-only memory would end the receiver here, and torch takes none of a device.
    receiver = start(RECEIVE, HERE, handle, "change")
    assert line(receiver) == "ready"
    asyncio.run(dv.BucketedWeightSender(handle, bucket_size_mb=1).async_send_weights(weights()))
    assert [pair for bucket in json.loads(line(receiver))[0] for pair in bucket] == expected()


def test_killed_receiver_is_an_error_of_the_sender(start: Start) -> None:
    handle = f"ipc:///tmp/verl-test-{os.getpid()}-killed"
    receiver = start(RECEIVE, HERE, handle, "stop")
    assert line(receiver) == "ready"

    def sent() -> Any:
        for number, pair in enumerate(weights() + weights()):
            if number == 5:  # the second bucket was published: the ring is full
                assert line(receiver) == "loading"
                receiver.kill()
                receiver.wait(timeout=30)
            yield pair

    with pytest.raises(device_ipc.GoneError):
        asyncio.run(dv.BucketedWeightSender(handle, bucket_size_mb=1).async_send_weights(sent()))


def test_receiver_that_ends_before_it_joins_is_an_error_of_the_sender(start: Start) -> None:
    handle = f"ipc:///tmp/verl-test-{os.getpid()}-early"
    receiver = start(
        """
        import device_ipc.verl as dv
        print("ready", flush=True)
        with d.connect(dv.name_of(sys.argv[1]), timeout=60) as channel:
            channel.receive(timeout=60)
        """,
        handle,
    )
    assert line(receiver) == "ready"
    # Not the end of a wait, which would be a TimeoutError.
    with pytest.raises(device_ipc.GoneError):
        asyncio.run(dv.BucketedWeightSender(handle, bucket_size_mb=1).async_send_weights(weights()))


def test_killed_sender_is_an_error_of_the_receiver(start: Start) -> None:
    handle = f"ipc:///tmp/verl-test-{os.getpid()}-sender"
    sender = start(
        """
        sys.path.insert(0, sys.argv[1])
        import asyncio, test_verl, device_ipc.verl as dv
        def sent():
            yield from test_verl.weights()
            print("sent", flush=True)
            sys.stdin.readline()
        asyncio.run(dv.BucketedWeightSender(sys.argv[2], 1).async_send_weights(sent()))
        """,
        HERE,
        handle,
    )
    received: "list[str]" = []

    def load(pairs: Any, is_last: bool) -> None:
        assert not is_last
        received.extend(name for name, _tensor in pairs)
        if len(received) > 6:
            assert line(sender) == "sent"
            sender.kill()
            sender.wait(timeout=30)

    with pytest.raises(device_ipc.GoneError):
        dv.BucketedWeightReceiver(handle, torch.device("cpu")).receive_weights(load)
    assert "large" in received


def test_exception_of_the_weights_reaches_the_caller_and_ends_the_receiver(start: Start) -> None:
    handle = f"ipc:///tmp/verl-test-{os.getpid()}-exception"
    receiver = start(RECEIVE, HERE, handle, "load")
    assert line(receiver) == "ready"

    def sent() -> Any:
        yield from weights()[:6]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(dv.BucketedWeightSender(handle, bucket_size_mb=1).async_send_weights(sent()))
    assert line(receiver) == "gone"


def test_signatures_are_those_of_verl() -> None:
    text = frameworks.source("verl", VERSION, "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py")
    code = frameworks.definitions(text, "BucketedWeightSender", "BucketedWeightReceiver")
    theirs = frameworks.run(code)
    for name, method in [("BucketedWeightSender", "async_send_weights"), ("BucketedWeightReceiver", "receive_weights")]:
        for one in ("__init__", method):
            own = inspect.signature(getattr(getattr(dv, name), one)).parameters
            other = inspect.signature(getattr(theirs[name], one)).parameters
            assert list(own)[: len(other)] == list(other), (name, one)
            assert [own[key].default for key in other] == [other[key].default for key in other]
            assert all(own[key].kind is inspect.Parameter.KEYWORD_ONLY for key in list(own)[len(other) :])


def test_import_loads_neither_torch_nor_verl() -> None:
    program = "import sys, device_ipc.verl; assert not {'torch', 'verl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


ROLLOUT = """
import asyncio, json
sys.path.insert(0, sys.argv[1])
import verl_modules
base = verl_modules.install()
import device_ipc.verl_backend
from sglang_worker import digest
engine = base.CheckpointEngineRegistry.new("device_ipc", bucket_size=1 << 20)
async def update():
    received = []
    async for name, tensor in engine.receive_weights(global_steps=1):
        received.append([name, digest(tensor)])
        if len(received) == 1:
            print("first", flush=True)
    return received
for _ in range(int(sys.argv[2])):
    print(json.dumps(engine.prepare()), flush=True)
    engine.init_process_group(**json.loads(sys.stdin.readline()))
    print(json.dumps(asyncio.run(update())), flush=True)
    engine.finalize()
"""


@pytest.fixture
def backend() -> Iterator[Any]:
    base = verl_modules.install()
    importlib.import_module("device_ipc.verl_backend")
    yield base.CheckpointEngineRegistry.get("device_ipc")
    verl_modules.remove()


def connected(backend: Any, trainers: "list[Any]", rollouts: "list[Any]") -> None:
    """Does what verl's manager does before an update."""
    metadata = [one.prepare() for one in trainers]
    metadata += [sys.modules["device_ipc.verl_backend"].Metadata(*json.loads(line(one))) for one in rollouts]
    topology = backend.build_topology(len(trainers), len(rollouts), metadata)
    for workers, arguments in zip((trainers, rollouts), topology):
        assert all(len(values) == len(workers) for values in arguments.values())
    for rank, trainer in enumerate(trainers):
        trainer.init_process_group(**{name: values[rank] for name, values in topology[0].items()})
    for rank, rollout in enumerate(rollouts):
        rollout.stdin.write(json.dumps({name: values[rank] for name, values in topology[1].items()}) + "\n")
        rollout.stdin.flush()


def test_checkpoint_engine_sends_updates_to_all_rollouts(backend: Any, start: Start) -> None:
    before = used()
    rollouts = [start(ROLLOUT, HERE, "2") for _ in range(2)]
    trainers = [backend(bucket_size=1 << 20, is_master=rank == 0) for rank in range(2)]
    for step in range(2):
        connected(backend, trainers, rollouts)
        made: "list[str]" = []

        def noted() -> Any:
            for pair in weights(step):
                made.append(pair[0])
                yield pair

        asyncio.run(trainers[1].send_weights(noted(), global_steps=step))
        assert len(made) == len(weights()), "other ranks take part in the collectives"
        asyncio.run(trainers[0].send_weights(weights(step), global_steps=step))
        for rollout in rollouts:
            assert line(rollout) == "first"
            assert json.loads(line(rollout)) == expected(step)
        for trainer in trainers:
            trainer.finalize()
    wait_used(before)


def test_checkpoint_engine_reports_a_killed_rollout(backend: Any, start: Start) -> None:
    rollouts = [start(ROLLOUT, HERE, "1") for _ in range(2)]
    trainer = backend(bucket_size=1 << 20, is_master=True)
    connected(backend, [trainer], rollouts)

    def sent() -> Any:
        for number, pair in enumerate(weights() + weights()):
            if number == 5:
                assert line(rollouts[1]) == "first"
                rollouts[1].kill()
                rollouts[1].wait(timeout=30)
            yield pair

    with pytest.raises(device_ipc.GoneError):
        asyncio.run(trainer.send_weights(sent()))
    trainer.finalize()


def test_checkpoint_engine_refuses_another_machine(backend: Any) -> None:
    master, other = backend(bucket_size=1 << 20, is_master=True), backend(bucket_size=1 << 20)
    first, second = master.prepare(), other.prepare()
    with pytest.raises(ValueError, match="rollout worker 1 is on another machine"):
        backend.build_topology(1, 2, [first, second, second._replace(host="another")])
    with pytest.raises(ValueError, match="is_master"):
        backend.build_topology(1, 1, [second, first])
    master.finalize()

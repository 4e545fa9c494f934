"""The vLLM backend: a trainer, here, and workers in processes of their own, with torch tensors in the memory of the mock.

Each test runs with stand-ins for the classes of each family of signatures, and with those of each release in target/vllm, which
``python tools/fetch_vllm.py VERSION...`` fetches: the base classes, the methods of the worker, and the reload by layers.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import unique

import device_ipc
import device_ipc.torch as dt
import device_ipc.vllm
import vllm_modules

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

TIMEOUT = 200
TESTS = Path(__file__).parent
GUIDE = TESTS.parents[1] / "docs/guide/vllm.md"
RELEASES = vllm_modules.releases()
TRAINERS = [version for version in ["0.28", "0.33", *RELEASES] if version not in ("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1")]
WORKERS = [*vllm_modules.STAND_INS, *RELEASES]


class Parallel(NamedTuple):
    """The parallelism of an engine of vLLM: ``tensor`` shards, ``stages`` of the pipeline, ``replicas`` of all."""

    tensor: int = 1
    stages: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages

    def shard(self, state: "dict[str, Any]", rank: int) -> "dict[str, Any]":
        """Returns the part of the weights that a rank of a replica holds."""
        stage, part = divmod(rank, self.tensor)
        shards = {}
        for name, tensor in state.items():
            if int(name.split(".")[1]) % self.stages == stage:
                rows = tensor.shape[0] // self.tensor if tensor.dim() and tensor.shape[0] % self.tensor == 0 else None
                shards[name] = tensor if rows is None else tensor[part * rows : (part + 1) * rows]
        return shards


class Model(torch.nn.Module):  # type: ignore[misc]
    """Loads its shards of the weights as models of vLLM do: by the ``weight_loader`` of each parameter, whose layers vLLM replaces."""

    def __init__(self, state: "dict[str, Any]", parallel: Parallel = Parallel(), rank: int = 0) -> None:
        super().__init__()
        self.names, self.part = set(state), rank % parallel.tensor
        self.refused: "str | None" = None
        self.loads = 0
        for name, tensor in parallel.shard(state, rank).items():
            path, _, attribute = name.rpartition(".")
            layer: Any = self
            for one in path.split("."):
                if one not in layer._modules:
                    layer.add_module(one, torch.nn.Module())
                layer = layer.get_submodule(one)
            parameter = torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            parameter.weight_loader = self.load_shard
            layer.register_parameter(attribute, parameter)

    def load_shard(self, param: Any, loaded: Any) -> None:
        if loaded.shape != param.shape:
            loaded = loaded.narrow(0, self.part * param.shape[0], param.shape[0])
        assert param.dtype == loaded.dtype and param.shape == loaded.shape
        param.data.copy_(loaded)

    def refuse(self, name: str) -> None:
        """Refuses a tensor in the next load. Another function loads it, so that an update is not replayed."""
        self.refused = name
        self.load_weights = functools.partial(self.load_weights)  # type: ignore[method-assign]

    def load_weights(self, weights: Any) -> None:
        self.loads += 1
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name not in self.names:
                raise AttributeError(f"the model has no attribute {name!r}")
            if name == self.refused:
                self.refused = None
                raise ArithmeticError(f"the model refuses {name!r}")
            if name in parameters:
                parameters[name].weight_loader(parameters[name], tensor)

    def digests(self) -> "dict[str, bytes]":
        return {name: digest(tensor) for name, tensor in self.named_parameters()}


def digest(tensor: Any) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())


def like(shapes: "list[tuple[str, str, list[int]]]") -> "dict[str, Any]":
    return {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in shapes}


def worker(connection: Any) -> None:
    """A process of vLLM with one worker."""
    one: Any = None
    while True:
        method, text = connection.recv()
        argument = json.loads(text)
        try:
            value = None
            if method == "make":
                if one is not None:
                    one.weight_transfer_engine.shutdown()
                version, shapes, parallel, rank, device = argument
                layout = Parallel(*parallel)
                model = Model(like(shapes), layout, rank % layout.ranks)
                place = device or torch.device("cpu")
                one = vllm_modules.make_worker(version, model, place, rank % layout.ranks, layout.ranks, rank // layout.ranks)
            elif method == "refuse":
                one.weight_transfer_engine.model.refuse(argument)
            elif method == "loads":
                value = one.weight_transfer_engine.model.loads
            elif method == "digests":
                value = one.weight_transfer_engine.model.digests()
            elif argument is None:
                getattr(one, method)()
            else:
                getattr(one, method)(argument)
            connection.send((True, value))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


IDLE: "list[tuple[Any, Any]]" = []
"""Processes and their connections, which serve one test after the other: the import of torch takes seconds."""


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    for process, connection in IDLE:
        process.kill()
        process.join(TIMEOUT)
        connection.close()
    IDLE.clear()


class Engine:
    """vLLM with several workers, and the client of the trainer: every payload passes as JSON text."""

    def __init__(self, version: str, state: "dict[str, Any]", parallel: Parallel, device: "str | None" = None) -> None:
        shapes = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in state.items()]
        context = multiprocessing.get_context("spawn")
        self.parallel = parallel
        self.calls: "list[tuple[str, Any]]" = []
        self.unread = False
        workers = parallel.ranks * parallel.replicas
        while len(IDLE) < workers:
            mine, other = context.Pipe()
            process = context.Process(target=worker, args=(other,), daemon=True)
            process.start()
            other.close()
            IDLE.append((process, mine))
        used = [IDLE.pop() for _ in range(workers)]
        self.processes, self.connections = [one[0] for one in used], [one[1] for one in used]
        for rank, connection in enumerate(self.connections):
            connection.send(("make", json.dumps([version, shapes, parallel, rank, device])))
        for connection in self.connections:
            assert connection.poll(TIMEOUT) and connection.recv() == (True, None)

    def ask(self, method: str, argument: Any = None) -> "list[Any]":
        """Calls a method of all workers, and waits for all replies."""
        self.calls.append((method, argument))
        text = json.dumps(argument)
        self.unread = True
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send((method, text))
        values: "list[Any]" = []
        errors: "list[Any]" = []
        for connection in self.connections:
            try:
                assert connection.poll(TIMEOUT), f"{method}: no reply"
                done, value = connection.recv()
            except (EOFError, ConnectionResetError):
                done, value = False, "the worker died"
            (values if done else errors).append(value)
        self.unread = False
        if errors:
            raise RuntimeError("; ".join(errors))
        return values

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(TIMEOUT)

    def remove(self, rank: int) -> None:
        """Kills a worker, and goes on without it."""
        self.kill(rank)
        self.processes.pop(rank)
        self.connections.pop(rank).close()

    def init_weight_transfer_engine(self, init_info: "dict[str, Any]") -> None:
        self.ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: "str | None" = None) -> None:
        self.ask("finish_weight_update")

    def check(self, state: "dict[str, Any]") -> None:
        """Compares the bytes of each worker."""
        found = self.ask("digests")
        assert len(found) == len(self.connections)
        for rank, digests in enumerate(found):
            shard = self.parallel.shard(state, rank % self.parallel.ranks)
            assert digests == {name: digest(tensor) for name, tensor in shard.items()}

    def close(self) -> None:
        for process, connection in zip(self.processes, self.connections):
            # A process with an unread reply is not reused.
            if process.is_alive() and not self.unread:
                IDLE.append((process, connection))
            else:
                process.kill()
                process.join(TIMEOUT)
                connection.close()


@pytest.fixture
def engines() -> Iterator["list[Engine]"]:
    started: "list[Engine]" = []
    synchronize, empty_cache = torch.accelerator.synchronize, torch.accelerator.empty_cache
    yield started
    for engine in started:
        engine.close()
    vllm_modules.remove()
    torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache


def weights(seed: int = 0) -> "dict[str, Any]":
    """Returns weights of several types in memory of the mock, of 5.1 MiB in all."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for number, (dtype, shape) in enumerate(
        [("bfloat16", (512, 512)), ("float32", (1024, 512)), ("uint8", (5, 3)), ("float32", ()), ("int8", (0, 7)), ("float16", (1000, 1000))]
    ):
        tensor = dt.empty(shape, dtype, "mock:0")
        tensor.copy_(torch.randint(0, 120, shape, generator=generator).to(tensor.dtype))
        # One is not contiguous.
        state[f"layers.{number // 2}.{'ab'[number % 2]}"] = tensor if number else tensor.t()
    return state


def worker_engine(version: str, state: "dict[str, Any]", backend: str = "device_ipc") -> Any:
    """Returns the engine of a worker in this process, as vLLM makes it."""
    vllm_modules.install(version)
    device_ipc.vllm.register()
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    backends = types.SimpleNamespace(backend=backend)
    return factory.WeightTransferEngineFactory.create_engine(backends, config, torch.device("cpu"), Model(state))


def trainer(version: str, state: "dict[str, Any]", client: Any, names: "list[str] | None" = None, rank: int = 0, **options: Any) -> Any:
    """Returns the engine of a trainer, as a user makes it."""
    vllm_modules.install(version)
    info = device_ipc.vllm.TrainerInitInfo(rank=rank, **options)
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    source = vllm_modules.source(list(state) if names is None else names, state)
    return factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def start(engines: "list[Engine]", version: str, state: "dict[str, Any]", parallel: Parallel = Parallel(2), **options: Any) -> Engine:
    engines.append(Engine(version, state, parallel, **options))
    return engines[-1]


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(stages=2), Parallel(replicas=2)], ids=["TP", "PP", "DP"])
@pytest.mark.parametrize("version", TRAINERS)
def test_two_workers_receive_their_shards_of_each_update(
    version: str, parallel: Parallel, bucket_bytes: int, engines: "list[Engine]"
) -> None:
    state = weights()
    engine = start(engines, version, state, parallel)
    sender = trainer(version, state, engine, bucket_bytes=bucket_bytes)
    for step in range(3):
        for tensor in state.values():
            tensor.copy_((tensor + step).to(tensor.dtype))
        sender.send_weights()
        engine.check(state)
    payload = json.dumps([argument for method, argument in engine.calls if method == "update_weights"][-1])
    assert ("buckets" in payload) == bool(bucket_bytes)
    # The ring is made once. Every bucket but the last is followed by another, so slots were written again.
    rings = [argument for method, argument in engine.calls if method == "init_weight_transfer_engine" and argument["ring"]]
    assert len(rings) == (1 if bucket_bytes else 0)
    buckets = len(json.loads(payload)["buckets"]) if bucket_bytes else 1
    if bucket_bytes:
        assert sender._sender._ring.sequence == 3 * buckets > 2 * 3
    # The first load was recorded; a worker's part of the others was copied.
    assert engine.ask("loads") == [buckets, buckets]
    sender.shutdown()


@pytest.mark.parametrize("version", [one for one in WORKERS if one not in TRAINERS])
def test_worker_of_versions_without_trainer_engine(version: str, engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, version, state)
    for bucket_bytes in (0, 1 << 20, 0):
        for tensor in state.values():
            tensor.copy_((tensor + 1).to(tensor.dtype))
        sender = device_ipc.vllm.WeightSender(engine, bucket_bytes=bucket_bytes)
        sender.send(state.items())
        engine.check(state)
        sender.close()
    for tensor in state.values():
        tensor.zero_()
    type(worker_engine(version, state)).trainer_send_weights(iter(state.items()), {"client": engine})
    engine.check(state)
    with pytest.raises(AttributeError, match="0.28"):
        device_ipc.vllm.TrainerInitInfo


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_update_with_other_weights_is_loaded_in_the_normal_way(bucket_bytes: int, engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state)
    sender = device_ipc.vllm.WeightSender(engine, bucket_bytes=bucket_bytes)
    loads = 0
    for names, replayed in [(list(state), False), (list(state), True), (list(state)[::-1], False), (list(state)[::-1], True)]:
        for tensor in state.values():
            tensor.copy_((tensor + 1).to(tensor.dtype))
        sender.send([(name, state[name]) for name in names])
        engine.check(state)
        found = engine.ask("loads")
        assert (found == [loads, loads]) == replayed
        loads = found[0]
    sender.close()


def test_payloads_of_one_update_are_not_replayed_as_one(engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state)
    halves = [device_ipc.share(dict(list(state.items())[at::2])) for at in range(2)]
    for _ in range(3):
        for tensor in state.values():
            tensor.copy_((tensor + 1).to(tensor.dtype))
        engine.start_weight_update()
        for half in halves:
            engine.update_weights({"weights": str(half)})
        engine.finish_weight_update()
        engine.check(state)
    assert engine.ask("loads") == [6, 6]


def test_replay_is_switched_off_by_a_variable(engines: "list[Engine]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE_IPC_REPLAY_LOADS", "0")
    state = weights()
    engine = worker_engine("0.33", state)
    with device_ipc.share(state) as export:
        for _ in range(2):
            engine.start_weight_update()
            engine.update_weights({"weights": str(export)})
            engine.finish_weight_update()
        assert engine.model.loads == 2
        assert engine.model.digests() == {name: digest(tensor) for name, tensor in state.items()}
        monkeypatch.delenv("DEVICE_IPC_REPLAY_LOADS")
        for _ in range(2):
            engine.start_weight_update()
            engine.update_weights({"weights": str(export)})
            engine.finish_weight_update()
        assert engine.model.loads == 3
        engine.shutdown()


def test_export_ends_with_the_update_and_nothing_stays_open(engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state)
    trainer("0.33", state, engine).send_weights()
    text = next(argument["weights"] for method, argument in engine.calls if method == "update_weights")
    with pytest.raises(device_ipc.StaleError):
        device_ipc.open(text)


@pytest.mark.parametrize("version", TRAINERS)
def test_kept_export_is_opened_once_and_follows_other_tensors(version: str, engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, version, state)
    sender = trainer(version, state, engine, keep_export=True)
    for step in range(4):
        for tensor in state.values():
            tensor.copy_((tensor + 1).to(tensor.dtype))
        sender.send_weights()
        engine.check(state)
        # Each worker opened it once, and uses it no longer.
        kept = sender._sender._kept[1]
        assert kept.opened == 2
        assert len(kept.holders()) == 2 and not any(holder.state == "in use" for holder in kept.holders())
    sender = device_ipc.vllm.WeightSender(engine, keep_export=True)
    sender.send(state.items())
    engine.check(state)
    assert sender._kept is not None
    first = sender._kept[1]
    name = next(iter(state))
    state[name] = dt.empty(tuple(state[name].shape), "bfloat16", "mock:0").fill_(3)
    sender.send(state.items())
    engine.check(state)
    assert first.closed and sender._kept is not None and not sender._kept[1].closed
    sender.close()
    assert sender._kept is None
    texts = [argument["weights"] for method, argument in engine.calls if method == "update_weights"]
    assert len(set(texts)) == 3
    with pytest.raises(device_ipc.StaleError):
        device_ipc.open(texts[-1])
    with pytest.raises(ValueError, match="keep_export"):
        device_ipc.vllm.WeightSender(engine, bucket_bytes=1, keep_export=True)


def test_failed_update_leaves_no_weights_for_the_next() -> None:
    vllm_modules.install("0.33")
    module: Any = importlib.import_module("device_ipc.vllm._worker")
    layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    model: Any = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.weight_loader = lambda one, tensor: one.data.copy_(tensor)

    def load_weights(pairs: Any) -> None:
        model.weight.weight_loader(model.weight, dict(pairs)["weight"])
        raise ZeroDivisionError

    model.load_weights = load_weights
    worker = module.Worker()
    worker.model, worker.model_config, worker.device = model, None, None
    with device_ipc.share({"weight": dt.empty([2, 2], torch.float32, "mock:0").fill_(7)}) as export:
        worker.start_weight_update()
        with pytest.raises(ZeroDivisionError):
            worker.receive_weights(module.UpdateInfo(weights=str(export)))
        layer = layerwise.get_layerwise_info(model)
        assert not layer.can_load() and not layer.loaded_weights and layer.load_numel == 0
    assert not (model.weight == 7).any()


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_missing_and_unlisted_tensors_are_named(bucket_bytes: int, engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state)
    names = list(state)
    sender = trainer("0.33", state, engine, [*names, "layers.0.a?"], bucket_bytes=bucket_bytes)
    with pytest.raises(device_ipc.LayoutError, match=r"do not contain 'layers.0.a\?'"):
        sender.send_weights()
    with pytest.raises(device_ipc.LayoutError, match="'layers.2.b', which their metadata does not list"):
        trainer("0.33", state, engine, names[:-1], bucket_bytes=bucket_bytes).send_weights()
    with pytest.raises(device_ipc.LayoutError, match="'layers.0.a'.*'layers.0.b'"):
        trainer("0.33", state, engine, [names[1], names[0], *names[2:]], bucket_bytes=bucket_bytes).send_weights()
    # The engine serves the next update.
    trainer("0.33", state, engine, bucket_bytes=bucket_bytes).send_weights()
    engine.check(state)


def test_wrong_payloads_are_refused(engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state, Parallel())
    ring = device_ipc.Ring(device_ipc.empty((2, 4096), "uint8", "mock:0"))
    export = device_ipc.share(state)
    for payload, message in [
        ({}, "either 'weights'"),
        ({"weights": "x", "buckets": []}, "either 'weights'"),
        ({"ipc_handles_pickled": "gASV"}, "ipc_handles_pickled"),
        ({"weights": "not a descriptor"}, "DescriptorError"),
        ({"weights": str(ring)}, "descriptor of a ring"),
        ({"buckets": [[["layers.0.a", "float32", [4], 0]]]}, "named no ring"),
    ]:
        engine.start_weight_update()
        with pytest.raises(RuntimeError, match=message):
            engine.update_weights(payload)
    with pytest.raises(RuntimeError, match="not the descriptor of a ring"):
        engine.init_weight_transfer_engine({"ring": str(export)})
    engine.init_weight_transfer_engine({"ring": str(ring), "timeout": 30})
    for bucket, message in [
        ([["layers.0.a", "float32", [4096], 0]], "needs 16384 B, but a slot of the ring has 4096 B"),
        ([["layers.0.a", "load", [1], 0]], "no element type load"),
    ]:
        engine.start_weight_update()
        ring.wait_readers(1, timeout=30)
        with ring.write(timeout=30):
            pass
        with pytest.raises(RuntimeError, match=message):
            engine.update_weights({"buckets": [bucket]})


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("moment", ["start_weight_update", "update_weights"])
def test_worker_killed_in_the_middle_stops_no_other(moment: str, bucket_bytes: int, engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state, Parallel(replicas=2))
    sender = trainer("0.33", state, engine, bucket_bytes=bucket_bytes)
    called = getattr(engine, moment)

    def call_and_kill(*arguments: Any) -> None:
        called(*arguments)
        engine.kill(0)

    # After start_weight_update, it has joined the ring, and will not read. After update_weights, it uses the export.
    setattr(engine, moment, call_and_kill)
    with pytest.raises(RuntimeError, match="the worker died"):
        sender.send_weights()
    setattr(engine, moment, called)
    for method, argument in engine.calls:
        if method == "update_weights" and not bucket_bytes:
            with pytest.raises(device_ipc.StaleError):
                device_ipc.open(argument["weights"])
    engine.remove(0)
    # The other one has finished the update, and takes part in the next.
    engine.check(state)
    for tensor in state.values():
        tensor.copy_((tensor + 1).to(tensor.dtype))
    sender.send_weights()
    engine.check(state)
    sender.shutdown()
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in state.values()] + [weakref.ref(one) for one in state.values()]
    del tensor
    state.clear()
    limit = time.monotonic() + 30
    while any(one() is not None for one in memory):
        gc.collect()
        assert time.monotonic() < limit, "the trainer's weights are not freed"
        time.sleep(0.01)


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("version", WORKERS)
def test_update_after_a_refused_one_is_complete(version: str, bucket_bytes: int, engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, version, state, Parallel(tensor=2))
    sender = device_ipc.vllm.WeightSender(engine, bucket_bytes=bucket_bytes, slots=1, timeout=60)
    sender.send(state.items())
    digests = [engine.ask("digests")]
    # vLLM keeps layers.1.a, and waits for the rest of its layer.
    engine.connections[0].send(("refuse", '"layers.1.b"'))
    assert engine.connections[0].recv() == (True, None)
    for tensor in state.values():
        tensor.copy_((tensor + 1).to(tensor.dtype))
    # Not an exception of the trainer that has waited for the worker to release a slot.
    with pytest.raises(RuntimeError, match="refuses 'layers.1.b'") as caught:
        sender.send(state.items())
    assert not isinstance(caught.value, device_ipc.Error)
    digests.append(engine.ask("digests"))
    # The other worker has received all. This one has whole layers of one version or the other.
    assert digests[1][1] != digests[0][1]
    (old, _), (mixed, _) = digests
    assert {name: mixed[name] == old[name] for name in mixed if mixed[name]} == {
        name: not name.startswith("layers.0") for name in mixed if mixed[name]
    }
    for tensor in state.values():
        tensor.copy_((tensor + 1).to(tensor.dtype))
    sender.send(state.items())
    engine.check(state)
    sender.close()


def test_failed_request_ends_the_wait_for_a_slot(engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state)
    sender = device_ipc.vllm.WeightSender(engine, bucket_bytes=1 << 20)

    def fail_when_the_ring_is_full(_update_info: Any) -> None:
        limit = time.monotonic() + TIMEOUT
        while sender._ring is None or sender._ring.sequence < 2:
            assert time.monotonic() < limit
            time.sleep(0.01)
        raise ConnectionError("the server closed the connection")

    # The workers have joined the ring, and receive no request to read.
    setattr(engine, "update_weights", fail_when_the_ring_is_full)
    before = time.monotonic()
    with pytest.raises(ConnectionError):
        sender.send(state.items())
    assert time.monotonic() - before < TIMEOUT
    delattr(engine, "update_weights")
    sender.send(state.items())
    engine.check(state)


def test_reason_of_workers_that_have_all_left_is_reported(engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state, Parallel())
    sender = device_ipc.vllm.WeightSender(engine, bucket_bytes=1 << 20, slots=1, timeout=60)
    engine.connections[0].send(("refuse", '"layers.0.a"'))
    assert engine.connections[0].recv() == (True, None)
    update = engine.update_weights

    def reply_late(update_info: Any) -> None:
        try:
            update(update_info)
        finally:
            # No reader is left, and the trainer does not give up before the reply.
            limit = time.monotonic() + 1
            while sender._ring is not None and time.monotonic() < limit:
                time.sleep(0.01)

    setattr(engine, "update_weights", reply_late)
    with pytest.raises(RuntimeError, match="refuses 'layers.0.a'"):
        sender.send(state.items())


@pytest.mark.parametrize("version", [one for one in WORKERS if one == "0.33" or one in RELEASES and one >= "0.29"])
def test_payload_for_each_rank_is_opened_by_that_rank(version: str, engines: "list[Engine]") -> None:
    state = weights()
    parallel = Parallel(tensor=2, replicas=2)
    engine = start(engines, version, state, parallel)
    states = [{name: (tensor + rank).to(tensor.dtype) for name, tensor in state.items()} for rank in range(4)]
    for one in states:
        for name, tensor in one.items():
            memory = dt.empty(tensor.shape, tensor.dtype, "mock:0")
            one[name] = memory.copy_(tensor)
    exports = [device_ipc.share(one) for one in states]
    engine.init_weight_transfer_engine({})
    engine.start_weight_update()
    engine.update_weights([{"weights": str(export)} for export in exports])
    pids = [process.pid for process in engine.processes]
    assert [[holder.pid for holder in export.holders()] for export in exports] == [[pid] for pid in pids]
    engine.finish_weight_update()
    for export in exports:
        export.close(timeout=30)
    for rank, found in enumerate(engine.ask("digests")):
        assert found == {name: digest(tensor) for name, tensor in parallel.shard(states[rank], rank % 2).items()}
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="IndexError"):
        engine.update_weights([])


@pytest.mark.parametrize("copy", ["never", "staged-if-needed"])
def test_worker_without_peer_access_receives_a_copy(copy: str) -> None:
    environment = {**os.environ, "DEVICE_IPC_MOCK": "devices=2;peers=none"}
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import test_vllm; test_vllm.send_without_peer_access({copy!r})"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=TIMEOUT)


def send_without_peer_access(copy: str) -> None:
    """The trainer's memory is on another device than the worker, and neither reaches the other."""
    state = weights()
    engine = Engine("0.33", state, Parallel(tensor=2), device="mock:1")
    try:
        sender = device_ipc.vllm.WeightSender(engine, copy=copy, timeout=60)
        if copy != "never":
            for _ in range(3):
                for tensor in state.values():
                    tensor.copy_((tensor + 1).to(tensor.dtype))
                sender.send(state.items())
                engine.check(state)
        else:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="no peer access.*staged"):
                    sender.send(state.items())
        with pytest.raises(ValueError, match="pass bucket_bytes=0"):
            device_ipc.vllm.WeightSender(engine, bucket_bytes=1, copy="staged-if-needed")
        with pytest.raises(RuntimeError, match="no peer access"):
            device_ipc.vllm.WeightSender(engine, bucket_bytes=1 << 20, timeout=60).send(state.items())
    finally:
        for process in engine.processes:
            process.kill()
            process.join(TIMEOUT)


def test_failing_source_ends_the_wait_of_the_workers(engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state)
    sender = device_ipc.vllm.WeightSender(engine, bucket_bytes=1 << 20)
    layout = [device_ipc.vllm._sender.Layout.of(*pair) for pair in state.items()]

    def failing() -> Iterator[Any]:
        yield from list(state.items())[:4]
        raise ArithmeticError("the source failed")

    with pytest.raises(ArithmeticError):
        sender.send(failing(), layout)
    for connection in engine.connections:
        assert not connection.poll(0)
    sender.send(state.items())
    engine.check(state)


def test_dead_trainer_is_reported_by_the_workers(engines: "list[Engine]") -> None:
    state = weights()
    engine = start(engines, "0.33", state)
    program = """
import sys, device_ipc
ring = device_ipc.Ring(device_ipc.empty((2, 2 << 20), "uint8", "mock:0"))
export = device_ipc.share(device_ipc.empty((4,), "uint8", "mock:0"))
print(str(ring), flush=True)
print(str(export), flush=True)
ring.wait_readers(2, timeout=60)
with ring.write(timeout=60): pass
print("published", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ring, export = process.stdout.readline().strip(), process.stdout.readline().strip()
        engine.init_weight_transfer_engine({"ring": ring, "timeout": 60})
        engine.start_weight_update()
        assert process.stdout.readline().strip() == "published"
        killer = threading.Timer(0.3, process.kill)
        killer.start()
        with pytest.raises(RuntimeError, match="GoneError.*GoneError"):
            engine.update_weights({"buckets": [[["layers.1.a", "uint8", [5, 3], 0]]] * 2})
        killer.join()
    finally:
        process.kill()
        process.communicate(timeout=30)
    engine.init_weight_transfer_engine({})
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="GoneError|StaleError"):
        engine.update_weights({"weights": export})
    # Another trainer serves the same workers, also if the first one was killed between two calls.
    engine.start_weight_update()
    successor = trainer("0.33", state, engine, bucket_bytes=1 << 20)
    with pytest.raises(RuntimeError, match="already active"):
        successor.send_weights()
    successor.send_weights()
    engine.check(state)


def test_ranks_that_do_not_send_take_part_in_the_source(engines: "list[Engine]") -> None:
    state, yielded = weights(), []

    class Recording(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            for pair in super().items():
                yielded.append(pair[0])
                yield pair

    class NoClient:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"rank 1 called {name}")

    trainer("0.33", Recording(state), NoClient(), rank=1).send_weights()
    assert yielded == list(state)


@pytest.mark.parametrize("version", WORKERS)
def test_registration_is_idempotent(version: str, engines: "list[Engine]") -> None:
    engine = worker_engine(version, {})
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    assert isinstance(engine, base.WeightTransferEngine)
    device_ipc.vllm.register()
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    with pytest.raises(ValueError, match="'device_ipc' is already registered"):
        factory.WeightTransferEngineFactory.register_engine("device_ipc", "other", "Engine")
    with pytest.raises(ValueError, match="Invalid weight transfer backend: other.*'device_ipc'"):
        worker_engine(version, {}, "other")
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    assert not inspect.isabstract(loaders.loaders["device_ipc"])


@pytest.mark.parametrize("version", WORKERS)
def test_name_of_another_package_is_an_error(version: str, engines: "list[Engine]") -> None:
    vllm_modules.install(version)
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    factory.WeightTransferEngineFactory.register_engine("device_ipc", "other", "Engine")
    for _ in range(2):
        with pytest.raises(ValueError, match="'device_ipc' is already registered"):
            device_ipc.vllm.register()


@pytest.mark.parametrize("version", WORKERS)
def test_payloads_are_parsed_by_the_base_class(version: str, engines: "list[Engine]") -> None:
    state = weights()
    engine = worker_engine(version, state)
    with device_ipc.Ring(device_ipc.empty((2, 4096), "uint8", "mock:0")) as ring:
        info = engine.parse_init_info({"ring": str(ring), "timeout": 5.0})
        assert (type(info), info.ring, info.timeout) == (engine.init_info_cls, str(ring), 5.0)
    assert engine.parse_init_info({}).ring is None
    export = device_ipc.share(state)
    update = engine.parse_update_info({"weights": str(export)})
    assert (type(update), update.weights, update.buckets) == (engine.update_info_cls, str(export), None)
    assert engine.parse_update_info({"buckets": []}).buckets == []
    for wrong in [{"master_address": "127.0.0.1"}, {"ring": 1}]:
        with pytest.raises(ValueError, match="Invalid init_info"):
            engine.parse_init_info(wrong)
    for wrong in [{"names": ["w1"]}, {"weights": 1}]:
        with pytest.raises(ValueError, match="Invalid update_info"):
            engine.parse_update_info(wrong)
    export.close(timeout=30)


@pytest.mark.parametrize("version", WORKERS)
def test_shutdown_is_repeatable_and_the_engine_goes_on(version: str, engines: "list[Engine]") -> None:
    state = weights()
    engine = worker_engine(version, state)
    engine.shutdown()
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
    reload.record_metadata_for_reloading(engine.model)
    for _ in range(2):
        # Without init_transfer_engine: an export needs nothing beforehand.
        export = device_ipc.share(state)
        engine.start_weight_update()
        engine.update_weights({"weights": str(export)})
        engine.finish_weight_update()
        engine.shutdown()
        engine.shutdown()
        export.close(timeout=30)
        assert engine.model.digests() == {name: digest(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("version", [one for one in WORKERS if one not in TRAINERS])
def test_trainer_send_weights_has_the_signature_of_the_base_class(version: str, engines: "list[Engine]") -> None:
    engine = worker_engine(version, {})
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    own, wanted = (inspect.signature(one.trainer_send_weights).parameters for one in (engine, base.WeightTransferEngine))
    assert list(own) == list(wanted)


@pytest.mark.parametrize("version", TRAINERS)
def test_trainer_engine_keeps_the_contract_of_the_base_class(version: str, engines: "list[Engine]") -> None:
    calls: "list[str]" = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name)

    state = weights()
    engine = trainer(version, state, Client())
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    assert isinstance(engine, base.TrainerWeightTransferEngine) and engine.is_sender
    engine.send_weights()
    assert calls == ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    engine.shutdown()
    engine.shutdown()
    calls.clear()
    other = trainer(version, state, Client(), rank=1)
    other.shutdown()
    assert not other.is_sender and calls == []
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    with pytest.raises(ValueError, match="WeightSource"):
        factory.WeightTransferTrainerFactory.trainer_init(device_ipc.vllm.TrainerInitInfo(rank=0), client=Client())
    with pytest.raises(ValueError, match="already registered"):
        factory.WeightTransferTrainerFactory.register_engine("device_ipc", "other", "Engine")


def test_old_vllm_is_a_warning(caplog: Any, engines: "list[Engine]") -> None:
    vllm_modules.install("0.25")
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    base.WeightTransferEngine = type("WeightTransferEngine", (), {})
    with caplog.at_level(logging.WARNING):
        device_ipc.vllm.register()
    assert "older than 0.25" in caplog.text
    caplog.clear()
    del sys.modules["vllm.distributed.weight_transfer.base"]
    del sys.modules["vllm.distributed.weight_transfer"]
    with caplog.at_level(logging.WARNING):
        device_ipc.vllm.register()
    assert "vLLM 0.25 or later" in caplog.text


def test_entry_point_names_the_function() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["device_ipc"].partition(":")
    assert getattr(importlib.import_module(module), name) is device_ipc.vllm.register


def test_import_needs_no_framework() -> None:
    program = "import sys, device_ipc.vllm; assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("version", WORKERS)
def test_loader_loads_from_a_keeper(version: str, engines: "list[Engine]") -> None:
    vllm_modules.install(version)
    device_ipc.vllm.register()
    loader: Any = importlib.import_module("vllm.model_executor.model_loader").loaders["device_ipc"]
    state = weights()
    model = Model(state)
    config = types.SimpleNamespace(
        device_config=types.SimpleNamespace(device="cpu"),
        load_config=types.SimpleNamespace(device=None),
        quant_config=None,
        model=model,
    )
    with device_ipc.keep(unique("vllm-test"), device_ipc.share(state)):
        options = types.SimpleNamespace(model_loader_extra_config={"source": f"keeper:{unique('vllm-test')}"}, device=None)
        one = loader(options)
        one.download_model(None)
        loaded = one.load_model(config, types.SimpleNamespace(dtype=torch.float32))
    assert loaded is model and not model.training
    assert model.digests() == {name: digest(tensor) for name, tensor in state.items()}
    refused = [
        ({}, "source"),
        ({"source": "keeper:x", "sorce": 1}, "sorce"),
        ({"source": "keeper:x", "publish": True}, "in_place"),
        ({"source": "x", "in_place": True}, "keeper:NAME"),
    ]
    for extra, message in refused:
        with pytest.raises(ValueError, match=message):
            loader(types.SimpleNamespace(model_loader_extra_config=extra))


class Attention(torch.nn.Module):  # type: ignore[misc]
    """A layer as vLLM's are: parameters without contents, a scale in Python, memory that a forward writes, and a table of its own."""

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, size), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty(size), requires_grad=False)
        self.scale = scale
        self.scratch = torch.empty(size, size)
        self.register_buffer("table", torch.arange(size * size, dtype=torch.float32))
        self.register_buffer("step", torch.zeros(1))


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A model of such layers whose first and last have the same weight."""

    def __init__(self, size: int = 64, scale: float = 2.0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(size, scale) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def fill(self) -> None:
        """Loads weights."""
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number)
        self.layers[0].step.fill_(7)

    def process(self) -> None:
        """Processes the weights, as vLLM does after a load."""
        self.layers[1].weight = torch.nn.Parameter(self.layers[1].weight.data.t(), requires_grad=False)


NUMBERS = itertools.count()


class Building:
    """vLLM's configuration of an engine that builds its model in the load."""

    def __init__(self, build: Any, rank: int = 0, name: str = "tied", ranks: int = 2, engine: str = "") -> None:
        self.build, self.built = build, None
        self.instance_id = engine or f"engine-{next(NUMBERS)}"
        self.device_config = types.SimpleNamespace(device="cpu")
        self.load_config = types.SimpleNamespace(device=None)
        self.quant_config = None
        self.parallel_config = types.SimpleNamespace(
            tensor_parallel_size=ranks, pipeline_parallel_size=1, enable_expert_parallel=False, rank=rank
        )
        self.model_config = types.SimpleNamespace(
            model=name, revision=None, dtype=torch.float32, quantization=None, hf_config=types.SimpleNamespace(to_dict=dict),
            sleep_mode_backend="cumem", enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=None,
        )  # fmt: skip

    @property
    def model(self) -> Any:
        if self.built is None:
            self.built = self.build()
        return self.built


def in_place_loader(version: str, keeper: str) -> Any:
    """Returns a function that loads a model in place, by the loader of a version of vLLM."""
    vllm_modules.install(version)
    device_ipc.vllm.register()
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    vllm: Any = importlib.import_module("vllm")
    vllm.__version__ = version
    utils: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")

    def initialize_model(vllm_config: Any, model_config: Any, prefix: str) -> Any:
        reload.record_metadata_for_reloading(vllm_config.model)
        return vllm_config.model

    utils.initialize_model = initialize_model
    base: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader")
    base.initialize_model = initialize_model
    for module in (utils, base):
        module.process_weights_after_loading = lambda model, model_config, device: model.process()
    loads: "list[Any]" = []

    class Normal(base.BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None: ...
        def load_weights(self, model: Any, model_config: Any) -> None:
            loads.append(self.load_config.load_format)
            model.fill()

    loaders.get_model_loader = Normal

    def load(config: Building, **extra: Any) -> Any:
        options = {"source": f"keeper:{keeper}", "in_place": True, "timeout": 60.0, **extra}
        loader = loaders.loaders["device_ipc"](types.SimpleNamespace(model_loader_extra_config=options, device=None, load_format="device_ipc"))
        model = loader.load_model(config, config.model_config)
        assert not model.training
        return model

    load.loads = loads  # type: ignore[attr-defined]
    return load


@pytest.fixture(params=WORKERS)
def in_place(request: pytest.FixtureRequest, start: Any) -> Any:
    """Returns a function that loads a model in place, from a keeper in another process."""
    load = in_place_loader(request.param, f"vllm-{os.getpid()}")
    keeper = start(
        """
        from device_ipc.vllm import WeightKeeper
        with WeightKeeper(sys.argv[1]):
            print("ready")
            sys.stdin.readline()
        """,
        f"vllm-{os.getpid()}",
    )
    assert keeper.stdout.readline() == "ready\n"
    return load


def test_engines_use_the_weights_in_place(in_place: Any) -> None:
    expected = Tied()
    expected.fill()
    expected.process()
    first = in_place(Building(Tied), publish=True, load_format="auto")
    second = in_place(Building(Tied))
    # It may publish, and need not.
    third = in_place(Building(Tied), publish=True)
    assert in_place.loads == ["auto"]
    for model in (first, second, third):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected.get_parameter(name)), name
            assert type(parameter) is torch.nn.Parameter and not parameter.requires_grad
        assert model.layers[0].weight is model.layers[2].weight
        assert model.layers[1].weight.stride() == (1, 64)
        assert model.device_ipc_weights.weights.mapping.read_only
        memory = [(one.ptr, one.ptr + one.nbytes) for one in model.device_ipc_weights.weights.mapping.regions]

        def inside(tensor: Any, memory: "list[tuple[int, int]]" = memory) -> bool:
            return any(begin <= tensor.data_ptr() < end for begin, end in memory)

        assert all(inside(parameter) for parameter in model.parameters())
        # What a forward may write is the engine's own.
        model.layers[0].scratch.fill_(1)
        model.layers[0].step.add_(1)
        assert not any(inside(one) for layer in model.layers for one in (layer.scratch, layer.table, layer.step))
        assert model.layers[0].step == 8 and model.layers[1].table[5] == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: Building(Tied, name="other"), "another model than this engine: 'tied', and not 'other'"),
        (lambda: Building(functools.partial(Tied, scale=3.0)), r"the number layers.0.scale of the kept weights is 2.0, and in this engine 3.0"),
        (lambda: Building(functools.partial(Tied, size=80)), r"the tensor layers.0.weight of the kept weights is .*64, 64"),
    ],
)
def test_other_weights_are_refused_before_they_are_opened(
    in_place: Any, config: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: "list[str]" = []
    real = dt.open

    def noted(name: str, **options: Any) -> Any:
        opened.append(name)
        return real(name, **options)

    monkeypatch.setattr(dt, "open", noted)
    in_place(Building(Tied), publish=True)
    assert len(opened) == 1
    with pytest.raises(device_ipc.LayoutError, match=message):
        in_place(config())
    assert len(opened) == 1


def test_ranks_have_their_own_weights(in_place: Any) -> None:
    models = [in_place(Building(Tied, rank=rank), publish=True) for rank in (1, 0, 3)]
    # The third is rank 1 of another replica.
    assert [model.device_ipc_weights.weights.mapping.descriptor for model in models].count(models[0].device_ipc_weights.weights.mapping.descriptor) == 2
    assert len(in_place.loads) == 2


def test_draft_model_has_weights_of_its_own(in_place: Any) -> None:
    in_place(Building(Tied), publish=True)
    config: Any = Building(Tied, name="draft")
    config.model_config.runner_type = "draft"
    draft = in_place(config, load_format="dummy")
    assert in_place.loads == ["auto", "dummy"] and not hasattr(draft, "device_ipc_weights")
    assert draft.layers[0].weight[0, 1] == 1


def test_model_that_reads_its_weights_is_refused(in_place: Any) -> None:
    in_place(Building(Tied), publish=True)

    class Reading(Tied):
        def process(self) -> None:
            super().process()
            self.maximum = self.layers[0].weight.max().item()

    with pytest.raises(device_ipc.UnsupportedError, match="without its weights"):
        in_place(Building(Reading))


class Loading(Model):
    """A model that vLLM's reload by layers can load in place, with a table that is computed."""

    def __init__(self, state: "dict[str, Any]") -> None:
        super().__init__(state)
        self.register_buffer("table", torch.arange(64.0))

    def fill(self) -> None:
        self.load_weights(list(weights().items()))

    def process(self) -> None:
        """Nothing is computed."""


class Worker:
    """A client of a worker in this process."""

    def __init__(self, config: Building, model: Any) -> None:
        factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
        backend = types.SimpleNamespace(backend="device_ipc")
        self.engine = factory.WeightTransferEngineFactory.create_engine(backend, config, torch.device("cpu"), model)
        self.updates = 0

    def init_weight_transfer_engine(self, init_info: "dict[str, Any]") -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: "dict[str, Any]") -> None:
        self.engine.update_weights(update_info)
        self.updates += 1

    def finish_weight_update(self) -> None:
        self.engine.finish_weight_update()


def test_new_weights_are_published_and_followed_in_place(in_place: Any) -> None:
    state = weights()
    config: Any = Building(lambda: Loading(state), ranks=1)
    first, second = in_place(config, publish=True), in_place(Building(lambda: Loading(state), ranks=1))
    addresses = [[one.data_ptr() for one in model.parameters()] for model in (first, second)]
    publisher, follower = Worker(config, first), Worker(config, second)
    sender = device_ipc.vllm.WeightSender(publisher, timeout=TIMEOUT)
    loads = first.loads
    # An engine gives its layers their KV caches after the load.
    first.kv_cache = torch.zeros(4096)

    def mapped() -> int:
        gc.collect()
        device_ipc.close_unused()
        return device_ipc.counters()["mapped_bytes"]

    in_use = mapped()
    for version in range(1, 5):
        former = {name: digest(tensor) for name, tensor in state.items()}
        for tensor in state.values():
            tensor.copy_(tensor + 1 if tensor.dtype.is_floating_point else tensor ^ 1)
        sender.send(state.items())
        # The engines go on with the former version until they follow.
        assert first.digests() == second.digests() == former
        for client, model in ((publisher, first), (follower, second)):
            device_ipc.vllm.follow(client)
            assert model.digests() == {name: digest(tensor) for name, tensor in state.items()}, version
        assert mapped() == in_use, "an engine keeps no further version mapped"
    assert first.loads == loads + 1, "the others were replayed"
    assert addresses == [[one.data_ptr() for one in model.parameters()] for model in (first, second)]
    late = in_place(Building(lambda: Loading(state), ranks=1))
    assert late.digests() == first.digests() and torch.equal(late.table, first.table)
    sender.close()


def test_failed_update_leaves_weights_in_place(in_place: Any) -> None:
    state = weights()
    config: Any = Building(lambda: Loading(state), ranks=1)
    model = in_place(config, publish=True)
    former = model.digests()
    worker = Worker(config, model)
    sender = device_ipc.vllm.WeightSender(worker, timeout=TIMEOUT)
    model.refuse(next(iter(state)))
    with pytest.raises(ArithmeticError):
        sender.send(state.items())
    assert model.digests() == former and model.device_ipc_weights.weights.mapping.read_only
    model.load_weights = functools.partial(Loading.load_weights, model)
    sender.send(state.items())
    device_ipc.vllm.follow(worker)
    assert model.digests() == {name: digest(tensor) for name, tensor in state.items()}


class Ranks:
    """A client of several workers, which vLLM calls at the same time."""

    def __init__(self, workers: "list[Worker]") -> None:
        self.workers = workers

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> None:
            with futures.ThreadPoolExecutor(len(self.workers)) as pool:
                calls = [pool.submit(getattr(worker, method), *arguments) for worker in self.workers]
            failures = [error for error in (one.exception() for one in calls) if error is not None]
            # The rank that has failed first says why; others may say no more than that it has left.
            failures.sort(key=lambda error: isinstance(error, device_ipc.GoneError))
            for error in failures:
                raise error

        return call


def test_no_rank_gets_a_version_that_the_others_do_not_get(in_place: Any) -> None:
    state = weights()
    configs: Any = [Building(lambda: Loading(state), rank=rank, engine="ranks") for rank in (0, 1)]
    models = [in_place(config, publish=True) for config in configs]
    former = models[0].digests()
    client = Ranks([Worker(config, model) for config, model in zip(configs, models)])
    sender = device_ipc.vllm.WeightSender(client, timeout=TIMEOUT)
    for tensor in state.values():
        tensor.zero_()
    models[1].refuse(next(iter(state)))
    with pytest.raises(ArithmeticError):
        sender.send(state.items())
    device_ipc.vllm.follow(client)
    assert [model.digests() for model in models] == [former, former]
    models[1].load_weights = functools.partial(Loading.load_weights, models[1])
    sender.send(state.items())
    device_ipc.vllm.follow(client)
    now = {name: digest(tensor) for name, tensor in state.items()}
    assert [model.digests() for model in models] == [now, now]


def test_ranks_name_the_failure_of_another(in_place: Any) -> None:
    state = weights()
    configs: Any = [Building(lambda: Loading(state), rank=rank, engine="ranks") for rank in (0, 1)]
    models = [in_place(config, publish=True) for config in configs]
    first, second = [Worker(config, model) for config, model in zip(configs, models)]
    with device_ipc.share(state) as export:
        for worker in (first, second):
            worker.init_weight_transfer_engine({"ring": None, "timeout": TIMEOUT, "copy": "never"})
            worker.start_weight_update()
        models[1].refuse(next(iter(state)))
        with pytest.raises(ArithmeticError):
            second.update_weights({"weights": str(export)})
        with pytest.raises(device_ipc.GoneError, match="rank 1 has failed: ArithmeticError"):
            first.update_weights({"weights": str(export)})


def test_engine_with_weights_of_its_own_follows_nothing(in_place: Any) -> None:
    worker = Worker(Building(Tied), Loading(weights()))
    with pytest.raises(device_ipc.UnsupportedError, match="with in_place"):
        device_ipc.vllm.follow(worker)


def test_engine_waits_for_a_publisher_until_its_timeout(in_place: Any) -> None:
    with pytest.raises(device_ipc.TimeoutError, match='"publish": true'):
        in_place(Building(Tied), timeout=0.2)
    with pytest.raises(ZeroDivisionError):
        in_place(Building(lambda: 1 / 0), publish=True)
    # A publisher that has failed is replaced by the next.
    in_place(Building(Tied), publish=True)


def test_engines_of_a_real_vllm_in_place() -> None:
    # In processes of their own: the stand-ins of this one take vLLM's place.
    there = subprocess.run([sys.executable, "-c", "import vllm.model_executor.model_loader"], capture_output=True, timeout=TIMEOUT)
    if there.returncode != 0:
        pytest.skip("vLLM is not installed")
    done = subprocess.run([sys.executable, str(TESTS / "vllm_in_place.py")], capture_output=True, text=True, timeout=280)
    assert "logits equal in 4 engines" in done.stdout, done.stdout[-3000:] + done.stderr[-6000:]


def test_programs_of_the_guide_run(engines: "list[Engine]", monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_modules.install("0.33")
    state = weights()
    client = start(engines, "0.33", state)
    package = vllm_modules.add("vllm.distributed.weight_transfer", HTTPVLLMWeightSyncClient=lambda url: client)
    vars(package).update(ModuleSource=lambda model: vllm_modules.source(list(state), model.state_dict()))
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    vars(package).update(WeightTransferTrainerFactory=factory.WeightTransferTrainerFactory)
    monkeypatch.setattr(device_ipc.vllm, "HTTPClient", lambda url: client)
    names = {"model": types.SimpleNamespace(state_dict=lambda: state)}
    programs = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        for tensor in state.values():
            tensor.copy_((tensor + 1).to(tensor.dtype))
        # Buckets of 1 GiB are more than a test should allocate.
        exec(compile(program.replace("1 << 30", "1 << 20"), str(GUIDE), "exec"), names)
        client.check(state)


def signatures(version: str) -> "dict[str, Any]":
    """Returns names, kinds and defaults of the parameters of the methods that this backend implements or calls."""
    vllm_modules.install(version)
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    found = {}
    classes = [base.WeightTransferEngine, factory.WeightTransferEngineFactory]
    if version in TRAINERS:
        classes += [base.TrainerWeightTransferEngine, factory.WeightTransferTrainerFactory]
    for one in classes:
        for name, method in inspect.getmembers(one, callable):
            if (name == "__init__" or not name.startswith("_")) and name not in NOT_IN_STAND_INS:
                parameters = inspect.signature(method).parameters.values()
                found[f"{one.__name__}.{name}"] = [(p.name, p.kind, p.default) for p in parameters]
        found[one.__name__] = sorted(getattr(one, "__abstractmethods__", ()))
    return found


NOT_IN_STAND_INS = {"set_weight_update_target", "reset_weight_update_target", "drain_pending"}


@pytest.mark.skipif(not RELEASES, reason="no release of vLLM in target/vllm; run python tools/fetch_vllm.py 0.25.1 0.28.0 0.33.0")
@pytest.mark.parametrize("version", RELEASES)
def test_stand_ins_have_the_signatures_of_the_releases(version: str, engines: "list[Engine]") -> None:
    family = "0.25" if version not in TRAINERS else "0.33" if version >= "0.33" else "0.28"
    found = signatures(version)
    assert found == signatures(family)

"""The trainers' and the workers' halves of the engines in separate processes, with a model on a device; and the keeper.

Skipped without a CUDA device. With ``DEVICE_IPC_TEST_ENGINES=mock`` they run on the mock, with a smaller model. The keeper's tests need
the package safetensors and the program ``device-ipc``, which ``DEVICE_IPC_PROGRAM`` may name; ``DEVICE_IPC_KEEPER_BYTES`` is the size
of their file, by default 2 GB, and 8 MB on the mock.
"""

import asyncio
import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc
import device_ipc.sglang
import device_ipc.torch as dt
import device_ipc.verl as dv
import device_ipc.vllm
import vllm_modules
from gpu.peer import Peer, until
from sglang_worker import StandInSerializer

BACKEND = os.environ["DEVICE_IPC_BACKEND"]
CUDA = torch.cuda.is_available()
MOCK = os.environ.get("DEVICE_IPC_TEST_ENGINES") == "mock" and not CUDA
pytestmark = [
    pytest.mark.skipif(not (CUDA or MOCK), reason="there is no CUDA device"),
    pytest.mark.skipif(CUDA and BACKEND != "cuda", reason="the tests of the engines need DEVICE_IPC_BACKEND=cuda"),
]

MIB = 1 << 20
TESTS = str(Path(__file__).parents[1])
BUCKET_MIB = 16 if CUDA else 1
# Buffers of kernels and libraries, which are not released.
SLACK = 96 * MIB
DEADLINE = 240


def start_peer() -> Peer:
    path = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    return Peer(DEVICE_IPC_BACKEND=BACKEND, PYTHONPATH=path, OMP_NUM_THREADS="1")


PRELUDE = "from gpu import engines; worker = None"


@pytest.fixture(scope="module")
def peers() -> Iterator["list[Peer]"]:
    """The processes of two workers, for all tests."""
    started = [start_peer() for _ in range(2)]
    for peer in started:
        peer.begin(PRELUDE)
    for peer in started:
        peer.answer(120)
    yield started
    for peer in started:
        peer.kill()


@pytest.fixture(scope="module")
def ranks(peers: "list[Peer]", tmp_path_factory: pytest.TempPathFactory) -> "list[Peer]":
    """The processes as tensor-parallel ranks."""
    path = str(tmp_path_factory.mktemp("group") / "rendezvous")
    for rank, peer in enumerate(peers):
        peer.begin("engines.join_group(path, rank, 2)", path=path, rank=rank)
    for peer in peers:
        peer.answer(90)
    return peers


class Workers:
    """The workers of an engine."""

    def __init__(self, peers: "list[Peer]", size: int, dtype: str) -> None:
        for number, peer in enumerate(peers):
            if peer.process.poll() is not None:
                # A test before has failed, and has killed it.
                peers[number] = start_peer()
                peers[number].run(PRELUDE, timeout=120)
        self.peers = peers[:size]
        self.ask("worker = None; engines.free(); worker = engines.Worker(rank, size, dtype)", size=size, dtype=dtype)

    def ask(self, program: str, **values: object) -> "list[Any]":
        """Runs a program in all workers at once; a tensor-parallel model needs that."""
        for rank, peer in enumerate(self.peers):
            peer.begin(program, rank=rank, **values)
        answers, failures = [], []
        # All answers are read, so that a failure leaves none to the next test.
        for peer in self.peers:
            try:
                answers.append(peer.answer())
            except pytest.fail.Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
        return answers

    def free(self) -> int:
        """Returns the free memory of the device, after all have given back what they do not use."""
        self.ask("engines.free()")
        import gpu.engines

        return gpu.engines.free()

    def check(self, model: Any) -> None:
        """Compares the outputs with those of the trainer's model."""
        import gpu.engines

        digest, part = gpu.engines.outputs(model)
        for found_digest, found in self.ask("result = worker.outputs()"):
            if len(self.peers) == 1:
                assert found_digest == digest
            else:
                # Products of other shapes are summed in another order.
                assert found == pytest.approx(part, rel=1e-3, abs=1e-3)


class Client:
    """vLLM's client of a trainer: every payload passes as JSON text."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def call(self, method: str, argument: Any = None) -> None:
        self.workers.ask("worker.call(method, text)", method=method, text=json.dumps(argument))

    def init_weight_transfer_engine(self, init_info: "dict[str, Any]") -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: "str | None" = None) -> None:
        self.call("finish_weight_update")


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    peers = request.getfixturevalue("peers" if request.param == 1 else "ranks")
    made = Workers(peers, request.param, "bfloat16" if request.param == 1 else "float32")
    yield made
    made.ask("worker.shutdown(); worker = None")


@pytest.fixture
def model(workers: Workers) -> Any:
    import gpu.engines

    made = gpu.engines.trained(torch.bfloat16 if len(workers.peers) == 1 else torch.float32)
    gpu.engines.train(made, 0)
    return made


def train(model: Any, seed: int) -> None:
    """Changes all weights, and with them the outputs."""
    import gpu.engines

    before = gpu.engines.outputs(model)
    gpu.engines.train(model, seed)
    assert gpu.engines.outputs(model) != before


def exports() -> "list[int]":
    """Returns the exports of this process."""
    own = [one for one in device_ipc.list_exports() if not isinstance(one, Exception) and one["pid"] == os.getpid()]
    return [export["export"] for one in own for export in one["exports"]]


@pytest.fixture
def stand_ins() -> Iterator[None]:
    synchronize, empty_cache = torch.accelerator.synchronize, torch.accelerator.empty_cache
    yield
    vllm_modules.remove()
    torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache


@pytest.mark.parametrize("bucket_mib", [0, BUCKET_MIB], ids=["export", "buckets"])
@pytest.mark.parametrize("version", ["0.28", "0.33"])
def test_vllm_engine_updates_the_model(version: str, bucket_mib: int, workers: Workers, model: Any, stand_ins: None) -> None:
    workers.ask("worker.vllm(version)", version=version)
    vllm_modules.install(version)
    before = exports()
    info = device_ipc.vllm.TrainerInitInfo(rank=0, bucket_bytes=bucket_mib * MIB)
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    state = model.state_dict()
    source = vllm_modules.source(list(state), state)
    seen = []
    for step in (1, 2):
        train(model, step)
        trainer = factory.WeightTransferTrainerFactory.trainer_init(info, client=Client(workers), source=source)
        trainer.send_weights()
        workers.check(model)
        trainer.shutdown()
        workers.ask("worker.engine.shutdown()")
        seen.append(workers.free())
    assert seen[1] >= seen[0] - SLACK, seen
    until(lambda: set(exports()) <= set(before))


def test_sglang_loader_updates_the_model(workers: Workers, model: Any) -> None:
    seen = []
    before = exports()
    for step in (1, 2):
        train(model, step)
        with device_ipc.sglang.share(model.state_dict()) as update:
            payload = StandInSerializer.serialize(update.named_tensors, output_str=True)
            workers.ask("worker.sglang(payload)", payload=payload)
        workers.check(model)
        seen.append(workers.free())
    assert seen[1] >= seen[0] - SLACK, seen
    until(lambda: set(exports()) <= set(before))


def test_verl_twins_update_the_model(workers: Workers, model: Any) -> None:
    seen = []
    before = exports()
    for step in (1, 2):
        train(model, step)
        for rank, peer in enumerate(workers.peers):
            handle = f"ipc:///tmp/verl-engines-{os.getpid()}-{rank}.sock"
            peer.begin("result = worker.verl(handle)", handle=handle)
            sender = dv.BucketedWeightSender(handle, bucket_size_mb=BUCKET_MIB)
            try:
                asyncio.run(sender.async_send_weights(iter(model.state_dict().items())))
            finally:
                buckets = peer.answer()
            assert buckets > 1
        workers.check(model)
        seen.append(workers.free())
    assert seen[1] >= seen[0] - SLACK, seen
    until(lambda: set(exports()) <= set(before))


def read_only(state: "dict[str, Any]") -> "dict[str, Any]":
    """Returns copies in memory that importers can be restricted to read."""
    if CUDA:
        with dt.pool():
            return {name: tensor.clone() for name, tensor in state.items()}
    copies = {}
    for name, tensor in state.items():
        memory = device_ipc.empty((tensor.nbytes,), "uint8", "mock:0", read_only=True)
        copies[name] = torch.from_dlpack(memory).view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copies


def untied(model: Any) -> "dict[str, Any]":
    """Returns the state of a model without second names of tied weights, as its files have it."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_models_of_two_processes_are_made_of_shared_weights(peers: "list[Peer]") -> None:
    import gpu.engines

    workers = Workers(peers, 1, "bfloat16")
    workers.peers = peers  # each with the whole model
    workers.ask("worker = engines.Worker(0, 1, 'bfloat16')")
    model = gpu.engines.trained(torch.bfloat16)
    digests = []
    for step in (1, 2):
        train(model, step)
        state = read_only(untied(model))
        size = sum(tensor.nbytes for tensor in state.values())
        export = device_ipc.share(state, access="r")
        del state
        # One after the other: each measures the device's free memory.
        taken = [peer.run("result = worker.transformers(text)", text=str(export)) for peer in workers.peers]
        assert not CUDA or max(taken) < size // 4, (taken, size)
        digest = gpu.engines.outputs(model)[0]
        assert [found[0] for found in workers.ask("result = worker.outputs()")] == [digest] * 2
        digests.append(digest)
        workers.ask("worker.module = None; engines.free()")
        export.close(timeout=30)
        del export
    assert digests[0] != digests[1]
    workers.ask("worker = None; engines.free()")


# The keeper.

KEEPER_BYTES = int(float(os.environ.get("DEVICE_IPC_KEEPER_BYTES", "2e9" if CUDA else "8e6")))


class KeeperProcess:
    """The program, which is ended with the test."""

    def __init__(self, path: Path, name: str, version: int = 1) -> None:
        program = shutil.which(os.environ.get("DEVICE_IPC_PROGRAM", "device-ipc"))
        if program is None:
            pytest.skip("the program device-ipc is not found; set DEVICE_IPC_PROGRAM")
        command = [program, "keep", str(path), "--device", "0", "--name", name, "--backend", BACKEND]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.output = b""

    def wait(self, text: str, timeout: float = 60) -> None:
        """Waits until the program has printed a text."""
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        while text.encode() not in self.output:
            left = max(0, end - time.monotonic())
            assert select.select([self.process.stdout], [], [], left)[0], f"not printed within {timeout} s: {text}"
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, f"the keeper has ended with status {self.process.wait(30)}: {self.output!r}"
            self.output += part

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def write_weights(path: Path, seed: int) -> None:
    """Writes a file of safetensors beside the present one, and renames it."""
    save_file: Any = pytest.importorskip("safetensors.torch", exc_type=ImportError).save_file
    generator = torch.Generator().manual_seed(seed)
    count = max(1, KEEPER_BYTES // (64 * MIB))
    rows = KEEPER_BYTES // count // 2 // 1024
    # The bytes of all tensors are one random tensor plus their number: their random numbers would take the longest.
    base = torch.randint(-(1 << 15), 1 << 15, (rows, 1024), dtype=torch.int16, generator=generator)
    state = {f"layers.{number}": (base + number).view(torch.bfloat16) for number in range(count)}
    state["norm"] = torch.full((7,), float(seed), dtype=torch.bfloat16)
    beside = path.with_suffix(".new")
    save_file(state, str(beside))
    os.replace(beside, path)


def file_digest(path: Path) -> "dict[str, int]":
    """Returns what ``engines.digest`` returns for the tensors of a file."""
    import gpu.engines

    load_file: Any = importlib.import_module("safetensors.torch").load_file
    return gpu.engines.digest(load_file(str(path)))


READ = """
before = engines.free()
opened = dt.open(name, device=engines.PLACE, allow_read_only=True, timeout=30)
taken = before - engines.free()
result = [engines.digest(dict(opened)), taken, opened.mapping.read_only]
"""


def test_keeper_serves_reloads_and_its_death_leaves_the_weights(tmp_path: Path) -> None:
    path, name = tmp_path / "model.safetensors", f"engines-{os.getpid()}"
    write_weights(path, 1)
    first = file_digest(path)
    with contextlib.ExitStack() as stack:
        readers = [start_peer() for _ in range(3)]
        for reader in readers:
            stack.callback(reader.kill)
        # The kernels of the sum are loaded, and their memory taken, before the memory is measured.
        warm = "from gpu import engines; engines.digest({'x': torch.zeros(1 << 20, dtype=torch.int16, device=engines.DEVICE)})"
        free = [reader.run(warm + "\nresult = engines.free()", timeout=120) for reader in readers][-1]
        keeper = KeeperProcess(path, name)
        stack.callback(keeper.kill)
        keeper.wait("keeps version 1")
        digest = "result = engines.digest(dict(opened))"

        def check_open(reader: Peer, expected: "dict[str, int]") -> None:
            found, taken, is_read_only = reader.run(READ, name=f"keeper:{name}")
            assert found == expected and is_read_only
            assert taken < 32 * MIB, taken

        for reader in readers:
            check_open(reader, first)
        if CUDA:
            assert free - readers[0].run("result = engines.free()") >= KEEPER_BYTES * 0.95

        # A write by the device ends the context of the process that writes, or the process, and changes nothing.
        writer = readers.pop()
        writer.begin(
            """
            try:
                opened["norm"].fill_(9)
                if engines.CUDA:
                    torch.cuda.synchronize()
                result = "written"
            except RuntimeError as error:
                result = str(error).splitlines()[0]
            """
        )
        if CUDA:
            assert writer.answer() != "written"
        else:
            assert writer.process.wait(30) == -signal.SIGSEGV
        writer.kill()
        assert [reader.run(digest) for reader in readers] == [first, first]

        # A new version, while a reader of the former one goes on.
        write_weights(path, 2)
        second = file_digest(path)
        assert second != first
        keeper.process.send_signal(signal.SIGHUP)
        keeper.wait("keeps version 2")
        assert readers[0].run(digest) == first
        readers[1].run("opened.close(); del opened")
        check_open(readers[1], second)
        assert readers[0].run(digest) == first
        readers[0].run("opened.close(); del opened")

        # The weights of a killed keeper stay with its readers, and the name is free for the next one.
        keeper.kill()
        assert readers[1].run(digest) == second
        again = KeeperProcess(path, name)
        stack.callback(again.kill)
        again.wait("keeps version 1")
        check_open(readers[0], second)
        assert readers[1].run(digest) == second

        for reader in readers:
            reader.run("opened.close(); del opened; engines.free()")
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(30) == 0
        if CUDA:
            until(lambda: bool(readers[0].run("result = engines.free()") >= free - SLACK))


def test_vllm_loader_starts_with_the_weights_of_a_keeper(peers: "list[Peer]") -> None:
    import gpu.engines

    workers = Workers(peers, 1, "bfloat16")
    model = gpu.engines.trained(torch.bfloat16)
    gpu.engines.train(model, 5)
    export = device_ipc.share(read_only(untied(model)), access="r")
    with device_ipc.keep(f"engines-{os.getpid()}", export):
        for _ in range(2):
            workers.ask("worker = engines.Worker(0, 1, 'bfloat16')")
            workers.ask("worker.vllm_loader(name)", name=f"keeper:engines-{os.getpid()}")
            workers.check(model)
        workers.ask("worker = None; engines.free()")
    export.close(timeout=30)

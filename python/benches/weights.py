"""What an update of weights takes from a trainer to two workers, beside the ways of vLLM and verl, and what a keeper saves.

    python benches/weights.py [--quick] [--bytes N] [--devices N] [--side SIDE]... [--output FILE] [--json FILE]

The weights have the shapes of Llama-3-8B, 16 GB in bfloat16; with `--bytes`, each tensor is shorter. The trainer is on the first
device, worker n on device n modulo `--devices`. Workers copy the weights into tensors of their own. The sides run one after the
other, each in processes of its own that are killed after `--limit` seconds:

    copy          one copy of the same number of bytes on the device, and between devices: what the others are measured by
    vllm          the steps of vLLM's backend "ipc": one buffer of 1 GiB, exported by PyTorch's reduce_tensor; for each chunk the
                  trainer copies into it and synchronises, and the workers clone, load, synchronise and reply
    ours-buckets  device_ipc.vllm: WeightSender and the workers' engine, with a ring of two buckets of the same size
    ours-export   device_ipc.vllm: the same, without buckets
    ours-kept     device_ipc.vllm: the same, with keep_export
    ours-once     a state dict that the workers have opened once, and copy from in each update
    verl          the steps of verl's BucketedWeightSender: one buffer of 512 MiB, a device synchronisation and a reply for each
                  bucket, and larger tensors by a reduce_tensor of their own
    ours-verl     device_ipc.verl, with two buckets of the same size
    keeper        processes that open the weights of a keeper, or read the same safetensors file from the page cache

The frameworks' ways use stock PyTorch, and send by the same pipes as ours: their servers are not measured. A bucket of verl's way goes
to both workers at once. A sample is the time from the begin of an update until the trainer has the replies of both workers that
the copies have been made; the workers' sums of the bytes are then compared with the trainer's. The first update is listed
separately.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import json
import math
import multiprocessing
import os
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from figures import llama_3_8b

SECONDS = 60
WORKERS = 2
SIDES = ("copy", "vllm", "ours-buckets", "ours-export", "ours-kept", "ours-once", "verl", "ours-verl", "keeper")
# The side that a side of ours is compared with.
PEERS = {"ours-buckets": "vllm", "ours-export": "vllm", "ours-kept": "vllm", "ours-once": "vllm", "ours-verl": "verl"}


class Setting(NamedTuple):
    backend: str
    devices: int
    nbytes: int
    rounds: int
    buffer_mib: int
    bucket_mib: int
    folder: str
    keeper: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes, of which `--bytes` scales the first dimension."""
        shapes = llama_3_8b()
        factor = self.nbytes / (2 * sum(map(math.prod, shapes.values())))
        return {name: (max(1, round(first * factor)), *rest) for name, (first, *rest) in shapes.items()}

    def device(self, number: int) -> Any:
        import torch

        return torch.device("cpu") if self.backend == "mock" else torch.device("cuda", number % self.devices)


def enter(setting: Setting, number: int) -> Any:
    """Makes a device the current one, and initialises it. Returns the device."""
    import torch

    torch.set_num_threads(1)
    device = setting.device(number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    synchronize()
    return device


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def collect() -> None:
    """Lets PyTorch see which memory is no longer open in other processes."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def make(setting: Setting, device: Any) -> dict[str, Any]:
    """Returns weights with random bytes; on the mock, in memory of it."""
    import torch

    import device_ipc.torch as dt

    state = {}
    for name, shape in setting.shapes().items():
        if device.type == "cpu":
            state[name] = dt.empty(shape, "bfloat16", "mock:0")
        else:
            state[name] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        state[name].view(torch.int16).random_(-(1 << 15), 1 << 15)
    synchronize()
    return state


def digest(state: dict[str, Any]) -> list[int]:
    """Returns a sum of the bytes of each tensor."""
    import torch

    sums = [tensor.view(torch.int16).sum(dtype=torch.int64) for tensor in state.values()]
    values: list[int] = torch.stack(sums).tolist()
    return values


def timed(body: Callable[[], object]) -> float:
    """Returns the milliseconds that a call takes."""
    begun = time.perf_counter_ns()
    body()
    return (time.perf_counter_ns() - begun) / 1e6


# The workers.


class Model:
    """What an engine has of a model: tensors, and a method that loads others into them."""

    def __init__(self, setting: Setting, device: Any) -> None:
        import torch

        shapes = setting.shapes()
        self.own = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
        self.setting, self.device = setting, device

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.own[name].copy_(tensor, non_blocking=True)

    def modules(self) -> list[Any]:
        """The layers that vLLM's stand-in would keep weights for until all of them have arrived."""
        return []


def rebuild(payload: Any, device: Any) -> Any:
    """Opens a tensor that was reduced, on this worker's device."""
    function, arguments = payload
    arguments = list(arguments)
    if device.type == "cuda":
        arguments[6] = device.index
    return function(*arguments)


class Commands:
    """The commands that a worker carries out; the reply is their result."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def digest(self, _argument: Any) -> list[int]:
        return digest(self.model.own)


class Vllm(Commands):
    buffer: Any = None
    is_new = False

    def start(self, _argument: Any) -> None:
        self.is_new = True

    def chunk(self, argument: Any) -> None:
        import torch

        names, shapes, sizes, payload = argument
        if self.is_new:
            # One importer for all chunks of an update, which drops that of the update before.
            self.buffer, self.is_new = rebuild(payload, self.model.device), False
        parts = self.buffer[: sum(sizes)].split(sizes)
        weights = [
            (name, part.clone().view(torch.bfloat16).view(shape)) for name, shape, part in zip(names, shapes, parts)
        ]
        self.model.load_weights(weights)
        synchronize()

    def finish(self, _argument: Any) -> None:
        pass


class OursVllm(Commands):
    """The worker's engine, with stand-ins for vLLM's base classes."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.engine = stand_in(model)

    def call(self, argument: Any) -> None:
        method, payload = argument
        if method == "init_weight_transfer_engine":
            self.engine.init_transfer_engine(self.engine.parse_init_info(json.loads(payload)))
        elif method == "update_weights":
            self.engine.update_weights(json.loads(payload))
        else:
            getattr(self.engine, method)()


def stand_in(model: Model) -> Any:
    """Returns the engine that vLLM would make for a worker."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    vllm_modules = importlib.import_module("vllm_modules")
    vllm_modules.install("0.33")
    device_ipc_vllm = importlib.import_module("device_ipc.vllm")
    device_ipc_vllm.register()
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    backend = types.SimpleNamespace(backend="device_ipc")
    return factory.WeightTransferEngineFactory.create_engine(backend, config, model.device, model)


class OursOnce(Commands):
    def open(self, text: str) -> None:
        import device_ipc.torch as dt

        device = None if self.model.device.type == "cpu" else self.model.device
        self.state = dt.open(text, device=device, timeout=SECONDS)

    def copy(self, _argument: Any) -> None:
        self.model.load_weights(self.state.items())
        synchronize()

    def close(self, _argument: Any) -> None:
        self.state.close()


class Verl(Commands):
    buffer: Any = None

    def receive(self, payload: Any) -> None:
        self.buffer = rebuild(payload, self.model.device)

    def bucket(self, described: Any) -> None:
        import torch

        weights = []
        for name, shape, offset, payload in described:
            if payload is not None:
                weights.append((name, rebuild(payload, self.model.device)))
                continue
            size = 2 * math.prod(shape)
            weights.append((name, self.buffer[offset : offset + size].view(torch.bfloat16).view(shape)))
        self.model.load_weights(weights)
        synchronize()

    def clean(self, _argument: Any) -> None:
        synchronize()
        self.buffer = None
        forget()


class OursVerl(Commands):
    def receive(self, name: str) -> None:
        import device_ipc
        import device_ipc.verl as dv

        with device_ipc.connect(name, timeout=SECONDS) as channel:
            for weights, _is_last in dv.received(channel, self.model.device):
                self.model.load_weights(weights)
        synchronize()


COMMANDS: dict[str, type[Commands]] = {
    "vllm": Vllm,
    "ours-buckets": OursVllm,
    "ours-export": OursVllm,
    "ours-kept": OursVllm,
    "ours-once": OursOnce,
    "verl": Verl,
    "ours-verl": OursVerl,
}


def work(pipe: Any, setting: Setting, side: str, rank: int) -> None:
    """A worker process, until the trainer ends it, has ended, or sends nothing for some time."""
    model = Model(setting, enter(setting, rank))
    commands = COMMANDS[side](model)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while pipe.poll(SECONDS):
            name, argument = pipe.recv()
            if name == "end":
                return
            pipe.send(getattr(commands, name)(argument))
            argument = None


class Team:
    """The worker processes, as the trainer sees them."""

    def __init__(self, setting: Setting, side: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(WORKERS):
            pipe, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, setting, side, rank), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def tell(self, name: str, argument: Any = None) -> None:
        for pipe in self.pipes:
            pipe.send((name, argument))

    def answers(self) -> list[Any]:
        for pipe in self.pipes:
            if not pipe.poll(SECONDS):
                raise TimeoutError(f"a worker has not replied within {SECONDS} s")
        return [pipe.recv() for pipe in self.pipes]

    def ask(self, name: str, argument: Any = None) -> list[Any]:
        self.tell(name, argument)
        return self.answers()

    def end(self) -> None:
        self.tell("end")
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join(10)


# The trainer.


def forget() -> None:
    """Gives unused memory back to the driver, as verl does after each update."""
    import torch

    gc.collect()
    collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reduced(tensor: Any) -> Any:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def buffer_of(nbytes: int, device: Any) -> Any:
    import torch

    buffer: Any = torch.empty(nbytes, dtype=torch.uint8, device=device)
    # Memory of the CPU is shared by a file, to which it moves.
    return buffer.share_memory_() if device.type == "cpu" else buffer


def by_vllm(team: Team, state: dict[str, Any], setting: Setting, device: Any) -> Callable[[], None]:
    import torch

    def update() -> None:
        team.ask("start")
        limit = setting.buffer_mib << 20
        buffer = buffer_of(limit, device)
        payload = reduced(buffer)
        names: list[str] = []
        shapes: list[Any] = []
        sizes: list[int] = []

        def send() -> None:
            synchronize()
            team.ask("chunk", (names, shapes, sizes, payload))
            # Of the trainer, after each chunk.
            collect()

        for name, tensor in state.items():
            flat = tensor.contiguous().view(torch.uint8).view(-1)
            if sizes and sum(sizes) + flat.numel() > limit:
                send()
                names, shapes, sizes = [], [], []
            end = sum(sizes)
            buffer[end : end + flat.numel()].copy_(flat)
            names.append(name)
            shapes.append(list(tensor.shape))
            sizes.append(flat.numel())
        send()
        team.ask("finish")

    return update


class Client:
    """vLLM's client of a trainer: every payload passes as JSON text."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def __getattr__(self, method: str) -> Callable[..., object]:
        return lambda payload=None: self.team.ask("call", (method, json.dumps(payload)))


def by_sender(team: Team, state: dict[str, Any], **options: Any) -> Callable[[], None]:
    import device_ipc.vllm

    sender = device_ipc.vllm.WeightSender(Client(team), timeout=SECONDS, **options)
    sender.connect()
    return lambda: sender.send(state.items())


def by_export(team: Team, state: dict[str, Any]) -> Callable[[], object]:
    import device_ipc

    export = device_ipc.share(state)
    team.ask("open", str(export))
    return lambda: (team.ask("copy"), export)


def by_verl(team: Team, state: dict[str, Any], setting: Setting, device: Any) -> Callable[[], None]:
    import torch

    def update() -> None:
        limit = setting.bucket_mib << 20
        buffer = buffer_of(limit, device)
        team.ask("receive", reduced(buffer))
        described: list[Any] = []
        offset = 0

        def send() -> None:
            synchronize()
            team.ask("bucket", described)

        for name, tensor in state.items():
            if offset + tensor.nbytes > limit and described:
                send()
                described, offset = [], 0
            if tensor.nbytes > limit:
                team.ask("bucket", [(name, list(tensor.shape), 0, reduced(tensor))])
                continue
            described.append((name, list(tensor.shape), offset, None))
            place = buffer[offset : offset + tensor.nbytes].view(torch.bfloat16).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            offset += tensor.nbytes
        send()
        team.tell("clean")
        del buffer, place
        forget()
        team.answers()

    return update


def by_twin(team: Team, state: dict[str, Any], setting: Setting, device: Any) -> Callable[[], None]:
    import device_ipc
    import device_ipc.verl as dv

    name = f"weights-{os.getpid()}"

    def update() -> None:
        with device_ipc.listen(name) as listener:
            team.tell("receive", name)
            channels = [listener.accept(timeout=SECONDS) for _ in range(WORKERS)]
        home = None if device.type == "cpu" else device
        asyncio.run(dv.send(state.items(), channels, setting.bucket_mib << 20, home))
        team.answers()

    return update


def run_updates(side: str, setting: Setting) -> dict[str, Any]:
    """Runs a side, as its trainer."""
    import torch

    team = Team(setting, side)
    device = enter(setting, 0)
    state = make(setting, device)
    team.answers()
    prepare: dict[str, Callable[[], Callable[[], object]]] = {
        "vllm": lambda: by_vllm(team, state, setting, device),
        "ours-buckets": lambda: by_sender(team, state, bucket_bytes=setting.buffer_mib << 20),
        "ours-export": lambda: by_sender(team, state),
        "ours-kept": lambda: by_sender(team, state, keep_export=True),
        "ours-once": lambda: by_export(team, state),
        "verl": lambda: by_verl(team, state, setting, device),
        "ours-verl": lambda: by_twin(team, state, setting, device),
    }
    update = prepare[side]()
    samples = []
    for _ in range(setting.rounds + 1):
        for tensor in state.values():
            tensor.view(torch.int16).add_(1)
        synchronize()
        samples.append(timed(update))
        expected = digest(state)
        if any(found != expected for found in team.ask("digest")):
            raise AssertionError(f"{side}: the workers have other bytes than the trainer")
    if side == "ours-once":
        team.ask("close")
    team.end()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    return {"side": side, "row": side, "samples_ms": samples[1:], "first_ms": samples[0], "bytes": nbytes, "workers": WORKERS}


def run_copies(setting: Setting) -> list[dict[str, Any]]:
    """Copies on the first device, and from it to the second one."""
    import torch

    source = torch.ones(setting.nbytes, dtype=torch.uint8, device=enter(setting, 0))
    rows = []
    for number in range(min(setting.devices, 2)):
        target = torch.zeros_like(source, device=setting.device(number))

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            synchronize()

        samples = [timed(copy) for _ in range(2 * setting.rounds + 1)]
        row = "copy" if number == 0 else "copy between devices"
        rows.append({"side": "copy", "row": row, "samples_ms": samples[1:], "first_ms": samples[0], "bytes": setting.nbytes, "workers": 1})
        del target
    return rows


# The keeper.


def write_file(setting: Setting, path: Path) -> None:
    """Writes the weights as a safetensors file, which thereby is in the page cache."""
    import torch

    header: dict[str, Any] = {}
    end = 0
    for name, shape in setting.shapes().items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    device = enter(setting, 0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in setting.shapes().values():
            tensor = torch.empty(shape, dtype=torch.int16, device=device).random_(-(1 << 15), 1 << 15)
            file.write(tensor.cpu().numpy().data.cast("B"))


def read_file(path: str, device: Any) -> tuple[dict[str, Any], str]:
    """Reads a safetensors file to a device. Returns the tensors, and by what they were read."""
    import torch

    try:
        from safetensors.torch import load_file  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        pass
    else:
        return load_file(path, device=str(device)), "safetensors"
    import mmap

    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = struct.unpack_from("<Q", memory)
    state = {}
    for name, one in json.loads(memory[8 : 8 + length]).items():
        begin, _end = one["data_offsets"]
        flat = torch.frombuffer(memory, dtype=torch.bfloat16, count=math.prod(one["shape"]), offset=8 + length + begin)
        state[name] = flat.view(one["shape"]).to(device, copy=True)
    return state, "mmap and torch.frombuffer"


def read(source: str, begun: float, setting: Setting) -> None:
    """A process that starts and gets its weights. Prints the milliseconds since its start, and the device memory that they took."""
    import torch

    import device_ipc.torch as dt

    imported = time.monotonic()
    device = enter(setting, 0)
    initialised = time.monotonic()
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    opened = None
    if source.startswith("keeper:"):
        # The sum only reads.
        place = None if device.type == "cpu" else device
        opened = dt.open(source, device=place, allow_read_only=True, timeout=SECONDS)
        state, way = dict(opened), "device_ipc"
    else:
        state, way = read_file(source, device)
    synchronize()
    ready = time.monotonic()
    taken = free - torch.cuda.mem_get_info()[0] if device.type == "cuda" else None
    sums = digest({name: state[name] for name in setting.shapes()})
    state.clear()
    if opened is not None:
        opened.close()
    times = {
        "total_ms": 1e3 * (ready - begun),
        "import_ms": 1e3 * (imported - begun),
        "device_ms": 1e3 * (initialised - imported),
        "weights_ms": 1e3 * (ready - initialised),
    }
    print(json.dumps({**times, "memory_bytes": taken, "way": way, "digest": sums}), flush=True)


def await_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """Waits until the keeper has loaded the weights."""
    assert keeper.stdout is not None
    end, output = time.monotonic() + SECONDS, b""
    while b"keeps version" not in output:
        if not select.select([keeper.stdout], [], [], max(0, end - time.monotonic()))[0]:
            raise TimeoutError(f"the keeper is not ready after {SECONDS} s: {output!r}")
        if not (part := os.read(keeper.stdout.fileno(), 4096)):
            raise RuntimeError(f"the keeper has ended with status {keeper.wait(10)}: {output!r}")
        output += part


def run_keeper(setting: Setting, note: Callable[[dict[str, Any]], None]) -> None:
    program = shutil.which(setting.keeper)
    if program is None:
        note({"side": "keeper", "row": "keeper", "skipped": f"{setting.keeper} not found"})
        return
    folder = Path(tempfile.mkdtemp(prefix="weights-", dir=setting.folder))
    try:
        path = folder / "model.safetensors"
        # In a process of its own: its memory of the device is free again.
        subprocess.run([sys.executable, __file__, "--write", str(path), *arguments_of(setting)], check=True, timeout=2 * SECONDS)
        name = f"weights-{os.getpid()}"
        command = [program, "keep", str(path), "--device", "0", "--name", name, "--backend", setting.backend]
        begun = time.monotonic()
        keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            await_keeper(keeper)
            loaded = 1e3 * (time.monotonic() - begun)
            nbytes = path.stat().st_size
            note({"side": "keeper", "row": "keeper loads the file", "samples_ms": [loaded], "bytes": nbytes})
            digests = []
            for source in (f"keeper:{name}", str(path)):
                found = []
                for _ in range(min(setting.rounds, 5)):
                    command = [sys.executable, __file__, "--read", source, "--begun", str(time.monotonic()), *arguments_of(setting)]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=SECONDS)
                    found.append(json.loads(done.stdout))
                    digests.append(found[-1].pop("digest"))
                note({"side": "keeper", "row": f"reader, {found[0]['way']}", "readers": found, "bytes": nbytes})
            if any(one != digests[0] for one in digests):
                raise AssertionError("the keeper's weights are not those of the file")
        finally:
            keeper.send_signal(signal.SIGTERM)
            try:
                keeper.wait(20)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait(20)
    finally:
        shutil.rmtree(folder)


# The tables.


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def spread(samples: list[float]) -> str:
    """Returns a median with the 10th and the 90th percentile."""
    if len(samples) < 3:
        return f"{median(samples):.1f}"
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return f"{median(samples):.1f} ({tenths[0]:.1f} to {tenths[-1]:.1f})"


def tables(rows: list[dict[str, Any]], title: str) -> str:
    updates = {row["row"]: row for row in rows if "workers" in row}
    lines = [
        title,
        "",
        "| side | update, ms: median (p10 to p90) | first update, ms | GB/s to all workers | of the rate of one copy | times as fast as |",
        "|---|---|---|---|---|---|",
    ]

    def rate(row: dict[str, Any]) -> float:
        return float(row["bytes"] * row["workers"] / median(row["samples_ms"]) / 1e6)

    for name, row in updates.items():
        of_copy = f"{rate(row) / rate(updates['copy']):.2f}" if "copy" in updates else ""
        peer = updates.get(PEERS.get(name, ""))
        times = f"{median(peer['samples_ms']) / median(row['samples_ms']):.2f} × {peer['row']}" if peer else ""
        lines.append(
            f"| {name} | {spread(row['samples_ms'])} | {row['first_ms']:.1f} | {rate(row):.1f} | {of_copy} | {times} |"
        )
    readers = [row for row in rows if "readers" in row]
    lines += [
        "",
        "| process that starts | start to weights ready, ms | of which the weights, ms | import, ms | device, ms | device memory of the weights, MiB |",
        "|---|---|---|---|---|---|",
    ]

    def column(row: dict[str, Any], key: str) -> list[float]:
        return [one[key] for one in row["readers"]]

    for row in readers:
        memory = [one["memory_bytes"] for one in row["readers"] if one["memory_bytes"] is not None]
        cells = [spread(column(row, key)) for key in ("total_ms", "weights_ms", "import_ms", "device_ms")]
        lines.append(f"| {row['row']} | {' | '.join(cells)} | {f'{median(memory) / 2**20:.1f}' if memory else '-'} |")
    if len(readers) == 2:
        ratios = [median(column(readers[1], key)) / median(column(readers[0], key)) for key in ("total_ms", "weights_ms")]
        lines.append(f"| times as fast | {ratios[0]:.2f} | {ratios[1]:.2f} | | | |")
    loads = [f"{row['row']}: {row['bytes'] / 1e9:.2f} GB in {row['samples_ms'][0]:.0f} ms" for row in rows if row["row"].startswith("keeper loads")]
    skipped = [f"{row['side']}: {row['skipped']}" for row in rows if "skipped" in row]
    return "\n".join([*lines, "", *loads, *skipped])


def run_side(side: str, limit: float, log: Path, setting: Setting) -> list[dict[str, Any]]:
    """Runs a side in a group of processes, which are killed at the end. Returns its rows, also those before a failure."""
    log.write_text("")
    command = [sys.executable, __file__, "--run", side, "--rows", str(log), *arguments_of(setting)]
    process = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=lambda: os.setpgid(0, 0))
    try:
        status = process.wait(limit)
        failure = f"the process has ended with status {status}" if status else None
    except subprocess.TimeoutExpired:
        failure = f"not finished after {limit:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return rows + ([{"side": side, "row": side, "skipped": failure}] if failure else [])


def arguments_of(setting: Setting) -> list[str]:
    return ["--setting", json.dumps(setting)]


def title_of(setting: Setting) -> str:
    """Returns what was run, and on which device; in a process of its own, as it initialises the device."""
    code = (
        "import torch, device_ipc; print(f'device_ipc {device_ipc.__version__}, torch {torch.__version__}, ' + "
        "(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'CPU'))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=2 * SECONDS)
    return (
        f"{done.stdout.strip()}; {setting.nbytes / 1e9:.2f} GB of weights, {WORKERS} workers on {setting.devices} device(s), "
        f"{setting.rounds} updates after the first; `python {' '.join(sys.argv)}`"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 updates after the first, not 9; 3 processes that start, not 5")
    parser.add_argument("--bytes", type=float, default=16.06e9, help="bytes of all weights")
    parser.add_argument("--devices", type=int, default=1, choices=(1, 2), help="devices of the workers")
    parser.add_argument("--side", action="append", choices=SIDES, help="only this side; can be repeated")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "mock"), help="mock: tensors of the CPU, which shows no speed")
    parser.add_argument("--buffer-mib", type=int, default=1024, help="buffer of vLLM's way, and buckets of ours")
    parser.add_argument("--bucket-mib", type=int, default=512, help="bucket of verl's way, and of ours")
    parser.add_argument("--keeper", default="device-ipc", help="the program that keeps weights")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the safetensors file is written for a time")
    parser.add_argument("--limit", type=float, default=180, help="seconds after which a side is killed")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds for all sides: no more are begun that may not end")
    parser.add_argument("--output", help="a file for the tables, in Markdown")
    parser.add_argument("--json", help="a file for the samples, a JSON object in each line")
    for hidden in ("--run", "--rows", "--read", "--write", "--setting"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.setting:
        setting = Setting(*json.loads(arguments.setting))
        if arguments.write:
            write_file(setting, Path(arguments.write))
        elif arguments.read:
            read(arguments.read, arguments.begun, setting)
        else:
            with open(arguments.rows, "a", buffering=1) as log:

                def note(row: dict[str, Any]) -> None:
                    log.write(json.dumps(row) + "\n")

                if arguments.run == "keeper":
                    run_keeper(setting, note)
                elif arguments.run == "copy":
                    for row in run_copies(setting):
                        note(row)
                else:
                    note(run_updates(arguments.run, setting))
        return
    begun = time.monotonic()
    # So that the processes of a side are killed with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ["DEVICE_IPC_BACKEND"] = arguments.backend
    setting = Setting(
        backend=arguments.backend,
        devices=arguments.devices,
        nbytes=int(arguments.bytes),
        rounds=3 if arguments.quick else 9,
        buffer_mib=arguments.buffer_mib,
        bucket_mib=arguments.bucket_mib,
        folder=arguments.folder,
        keeper=arguments.keeper,
    )
    title = title_of(setting)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for side in arguments.side or SIDES:
            left = arguments.time_limit - (time.monotonic() - begun)
            if left < 10:
                rows = [{"side": side, "row": side, "skipped": "no time is left for it"}]
            else:
                rows = run_side(side, min(left, arguments.limit), Path(folder) / "rows", setting)
            found += rows
            for row in rows:
                print(json.dumps(row), file=sys.stderr, flush=True)
            if arguments.json:
                with open(arguments.json, "a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            if arguments.output:
                Path(arguments.output).write_text(tables(found, title) + "\n")
    print(tables(found, title))
    if any("skipped" in row for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()

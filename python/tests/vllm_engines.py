"""Engines whose weights are in place, one rank in each process, for test_vllm_sleep.py and test_vllm_ranks.py: vLLM's worker, reload and loader
with a model of test_vllm.py, in memory of the mock."""

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import types
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import device_ipc
import vllm_modules

TIMEOUT = 200


def break_take(in_place: Any, dies: bool) -> None:
    """Has this rank fail the next time that it takes a version, when all ranks are there, or kill the process."""
    weights = in_place.weights

    def fail(_descriptor: str) -> None:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        object.__setattr__(in_place, "weights", weights)
        raise ArithmeticError("this rank maps nothing")

    mapping = weights.mapping
    facts = {"is_suspended": mapping.is_suspended, "descriptor": "", "devices": mapping.devices}
    broken = types.SimpleNamespace(mapping=types.SimpleNamespace(**facts, resume=fail, replace=fail))
    object.__setattr__(in_place, "weights", broken)


def make(version: str, keeper: str, name: str, number: int, ranks: int, options: "dict[str, Any]") -> "tuple[Any, Any]":
    """Returns a rank of an engine, and its model."""
    import test_vllm
    import torch

    load = test_vllm.in_place_loader(version, keeper)
    # All models in place of a process sleep with it: those of former tests are gone, with the modules that they were made by.
    gc.collect()
    importlib.import_module("device_ipc._in_place").MODELS.clear()
    user = options.pop("user", None)
    if user is not None:
        os.setegid(user)
        os.seteuid(user)
        # This thread still reads the files of modules, which this user may not be permitted to.
        ctypes.CDLL(None).setfsuid(0)
    state = test_vllm.weights()
    kind = {"rank": number, "ranks": ranks, "engine": name, "name": options.pop("model", "model")}
    config: Any = test_vllm.Building(lambda: test_vllm.Loading(state), **kind)
    model = load(config, **options)
    if config.model_config.sleep_mode_backend != "device_ipc":
        raise AssertionError("the loader has selected no sleep mode backend")
    return vllm_modules.worker_of(version, model, torch.device("cpu"), number, ranks, 0, config.model_config), model


def serve(connection: Any) -> None:
    """A process of vLLM with one rank."""
    import test_vllm

    rank: Any = None
    model: Any = None
    while True:
        method, text = connection.recv()
        argument = json.loads(text)
        try:
            value = None
            if method == "make":
                rank = model = None
                rank, model = make(*argument)
            elif method == "digests":
                value = [test_vllm.digest(one).hex() for one in model.parameters()]
            elif method == "addresses":
                value = [one.data_ptr() for one in model.parameters()]
            elif method == "allocator":
                allocator = importlib.import_module("vllm.device_allocator").get_mem_allocator_instance()
                value = [allocator.offloaded, allocator.woken]
            elif method == "suspended":
                value = model.device_ipc_weights.is_suspended
            elif method == "refuse":
                model.refuse(argument)
            elif method == "break_open":
                dt: Any = importlib.import_module("device_ipc.torch")
                opened = dt.open

                def refuse(*_: Any, **__: Any) -> Any:
                    dt.open = opened
                    raise ArithmeticError("this rank opens nothing")

                dt.open = refuse
            elif method == "break_take":
                break_take(model.device_ipc_weights, argument)
            elif argument is None:
                getattr(rank, method)()
            else:
                getattr(rank, method)(argument)
            connection.send((True, value))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


IDLE: "list[tuple[Any, Any]]" = []
"""Processes and their connections, which serve one test after the other: the import of torch takes seconds."""


class Rank:
    """A process with one rank."""

    def __init__(self) -> None:
        if not IDLE:
            context = multiprocessing.get_context("spawn")
            connection, other = context.Pipe()
            process = context.Process(target=serve, args=(other,), daemon=True)
            process.start()
            other.close()
            IDLE.append((process, connection))
        self.process, self.connection = IDLE.pop()

    def begin(self, method: str, argument: Any = None) -> None:
        self.connection.send((method, json.dumps(argument)))

    def end(self) -> Any:
        if not self.connection.poll(TIMEOUT):
            raise AssertionError("no reply")
        try:
            done, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            done, value = False, "the rank died"
        if not done:
            raise RuntimeError(value)
        return value

    def ask(self, method: str, argument: Any = None) -> Any:
        self.begin(method, argument)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT)
        self.connection.close()


class Engine:
    """All ranks of an engine, and the client of a trainer. Each call waits for the replies of all, and raises their errors."""

    def __init__(self, version: str, keeper: str, name: str, ranks: int = 1, **options: Any) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        # A process that is another user's stays so.
        self.is_reusable = "user" not in options
        for number, rank in enumerate(self.ranks):
            rank.begin("make", [version, keeper, name, number, ranks, options])
        try:
            for rank in self.ranks:
                rank.end()
        except RuntimeError:
            self.close()
            raise

    def ask(self, method: str, argument: Any = None) -> "list[Any]":
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.begin(method, argument)
        with futures.ThreadPoolExecutor(len(self.ranks)) as pool:
            replies = [pool.submit(rank.end) for rank in self.ranks]
        errors = [str(reply.exception()) for reply in replies if reply.exception() is not None]
        if errors:
            raise RuntimeError("; ".join(errors))
        return [reply.result() for reply in replies]

    def init_weight_transfer_engine(self, init_info: "dict[str, Any]") -> None:
        self.ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.ask("start_weight_update")

    def update_weights(self, update_info: "dict[str, Any]") -> None:
        self.ask("update_weights", update_info)

    def finish_weight_update(self) -> None:
        self.ask("finish_weight_update")

    def close(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive() and self.is_reusable:
                IDLE.append((rank.process, rank.connection))
            else:
                rank.kill()


class Engines:
    """The engines of one keeper, which is in this process."""

    def __init__(self, version: str, name: str, allow_users: "list[int] | None") -> None:
        self.version = version
        self.started: "list[Engine]" = []
        self.keeper = device_ipc.vllm.WeightKeeper(name, allow_users=allow_users)

    def start(self, name: str, ranks: int = 1, **options: Any) -> Engine:
        self.started.append(Engine(self.version, self.keeper.name, name, ranks, **options))
        return self.started[-1]

    def readers(self, rank: int = 0) -> int:
        """Returns the number of processes that have the present version of a rank mapped."""
        return sum(holder.state == "in use" for holder in self.keeper.exports[rank].holders())


@contextlib.contextmanager
def engines(version: str, name: str = f"engines-{os.getpid()}", allow_users: "list[int] | None" = None) -> Iterator[Engines]:
    one = Engines(version, name, allow_users)
    try:
        with one.keeper:
            yield one
    finally:
        for engine in one.started:
            engine.close()


def end() -> None:
    """Ends the processes that serve no test."""
    for process, connection in IDLE:
        process.kill()
        process.join(TIMEOUT)
        connection.close()
    IDLE.clear()

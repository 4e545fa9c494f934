"""PyTorch's CUDA payloads over CPU storages, whose memory is the mock's; for test_torch_install.py and the processes that it starts.

``reduce_tensor`` is PyTorch's own code with one word changed, so that it takes tensors of the CPU for tensors of a CUDA device.
"""

import inspect
import multiprocessing.reduction
import os
import queue
import sys
from typing import Any

os.environ.setdefault("DEVICE_IPC_BACKEND", "mock")
os.environ.setdefault("DEVICE_IPC_MOCK", "devices=2;like=cuda")

import numpy
import torch
import torch.multiprocessing
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import rebuild_cuda_tensor as _imported_by_name  # before anything is replaced

from conftest import Gate

import device_ipc
import device_ipc.torch as dt

TIMEOUT = 200

# Without its type, which PyTorch does not state.
rebuild_cuda_tensor: Any = _imported_by_name


def _reduce_tensor() -> Any:
    source = inspect.getsource(reductions.reduce_tensor)
    assert source.count('device.type == "cuda"') == 1
    namespace = dict(vars(reductions))
    exec(source.replace('device.type == "cuda"', 'device.type == "cpu"'), namespace)
    return namespace["reduce_tensor"]


reduce_tensor = _reduce_tensor()


def enter(payload_lifetime: float = 600.0) -> None:
    """Prepares a process: CUDA is not initialised, and tensors of the CPU travel as those of CUDA do."""
    torch.cuda._lazy_init = lambda: None
    torch._C._cuda_ipc_collect = lambda: None
    for cls in (torch.Tensor, torch.nn.Parameter):
        multiprocessing.reduction.ForkingPickler.register(cls, reduce_tensor)
    dt.install(payload_lifetime=payload_lifetime)


def leave() -> None:
    """Undoes ``enter`` as far as it concerns other tests."""
    dt.uninstall()
    for cls in (torch.Tensor, torch.nn.Parameter):
        multiprocessing.reduction.ForkingPickler.register(cls, reductions.reduce_tensor)


def filled(value: float, shape: "list[int]", dtype: Any = torch.float32) -> Any:
    """Returns a tensor in memory of the mock."""
    tensor = dt.empty(shape, torch.uint8 if dtype.itemsize == 1 else dtype, "mock:0")
    if dtype.itemsize == 1:
        tensor = tensor.view(dtype)
    return tensor.copy_(torch.full(shape, value).to(dtype))


def in_one_block(count: int, nbytes: int = 512) -> "list[Any]":
    """Returns tensors of ones, each with a storage of its own, in one allocation, as torch's caching allocator places them."""
    block = numpy.from_dlpack(device_ipc.empty((count * nbytes,), "uint8", "mock:0"))
    block.view(numpy.float32)[:] = 1
    return [torch.from_numpy(part.view(numpy.float32)) for part in numpy.split(block, count)]


def payload(tensor: Any) -> "tuple[Any, ...]":
    """Returns the arguments of ``rebuild_cuda_tensor``."""
    function, arguments = reduce_tensor(tensor)
    assert function is rebuild_cuda_tensor
    return tuple(arguments)


def receiver(inbox: Any, outbox: Any) -> None:
    """A process that carries out commands until it is told to end: a function of this module's ``Commands``."""
    enter()
    commands = Commands(outbox)
    while True:
        name, *arguments = inbox.get(timeout=TIMEOUT)
        if name == "end":
            break
        try:
            outbox.put((True, getattr(commands, name)(*arguments)))
        except Exception as error:
            outbox.put((False, f"{type(error).__name__}: {error}"))
        arguments.clear()


class Commands:
    def __init__(self, outbox: Any) -> None:
        self.outbox = outbox
        self.held: "list[Any]" = []
        self.work: "Gate | None" = None

    def begin_work(self) -> None:
        """Submits device work, which takes until ``end_work``."""
        self.work = Gate(device_ipc.Stream("mock:0"))

    def end_work(self) -> None:
        if self.work is not None:
            self.work.open()
            self.work = None

    def open(self, arguments: "tuple[Any, ...]", device: "int | None" = None, keep: bool = True) -> "tuple[Any, ...]":
        """Rebuilds a tensor; returns its sum, type, requires_grad, strides and the address of its storage."""
        listed = list(arguments)
        if device is not None:
            listed[6] = device
        tensor = rebuild_cuda_tensor(*listed)
        if keep:
            self.held.append(tensor)
        total = tensor.detach().to(torch.float64).sum().item()
        storage = tensor.untyped_storage()
        return total, type(tensor).__name__, tensor.requires_grad, tuple(tensor.stride()), storage._cdata, storage.nbytes()

    def open_apart(self, arguments: "tuple[Any, ...]", keep: bool) -> None:
        """Rebuilds a tensor in a storage of its own, although this process may have one of the same memory."""
        reductions.shared_cache.clear()
        self.open(arguments, None, keep)

    def open_block(self, arguments: "tuple[Any, ...]") -> None:
        """Opens the block of a storage, without a storage in it."""
        kind, descriptor = arguments[7][:4], arguments[7][4 + 3 * 8 :]
        assert kind == b"DIPB"
        self.held.append(device_ipc.open(descriptor))

    def open_all(self, payloads: "list[tuple[Any, ...]]") -> float:
        """Rebuilds tensors; returns their sum."""
        tensors = [rebuild_cuda_tensor(*arguments) for arguments in payloads]
        self.held += tensors
        return float(sum(float(tensor.sum()) for tensor in tensors))

    def hold(self, tensor: Any) -> float:
        """Keeps a tensor that came with the command."""
        self.held.append(tensor)
        return float(tensor.sum())

    def add(self, index: int, value: float) -> None:
        with torch.no_grad():
            self.held[index].add_(value)

    def forward(self, index: int) -> "tuple[Any, ...]":
        return payload(self.held[index])

    def forward_alias(self, index: int) -> "tuple[Any, ...]":
        """Sends on a tensor with a storage of its own in the same memory."""
        alias = torch.utils.dlpack.from_dlpack(self.held[index])
        assert alias.untyped_storage()._cdata != self.held[index].untyped_storage()._cdata
        return payload(alias)

    def send(self, index: int) -> None:
        """Sends a tensor on, through the queue."""
        self.outbox.put(self.held[index])

    def drop(self, count: "int | None" = None) -> None:
        """Drops the first tensors, or all."""
        del self.held[:count]

    def reset(self) -> None:
        """Closes everything, also what the cache keeps."""
        self.end_work()
        self.held.clear()
        device_ipc.close_unused(30)

    def counters(self) -> "dict[str, int]":
        return device_ipc.counters()

    def devices(self) -> "list[str]":
        from device_ipc import _torch_install

        return _torch_install._storages.devices()

    def pid(self) -> int:
        return os.getpid()


class Receiver:
    """A process that runs ``receiver``."""

    def __init__(self, method: str = "spawn") -> None:
        context: Any = torch.multiprocessing.get_context(method)
        self.inbox, self.outbox = context.Queue(), context.Queue()
        self.process = context.Process(target=receiver, args=(self.inbox, self.outbox), daemon=True)
        self.process.start()

    def ask(self, *command: Any) -> Any:
        """Carries out a command, which succeeds."""
        done, value = self.ask_for(*command)
        assert done, value
        return value

    def ask_for(self, *command: Any) -> "tuple[bool, Any]":
        self.inbox.put(command)
        answer: "tuple[bool, Any]" = self.receive()
        return answer

    def receive(self) -> Any:
        for _ in range(TIMEOUT):
            try:
                return self.outbox.get(timeout=1)
            except queue.Empty:
                assert self.process.is_alive(), f"the process has ended: {self.process.exitcode}"
        raise AssertionError("no answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT)

    def close(self) -> None:
        if self.process.is_alive():
            self.inbox.put(("end",))
            self.process.join(10)
        self.kill()
        for one in (self.inbox, self.outbox):
            one.close()
            one.cancel_join_thread()


if __name__ == "__main__":
    # A sender that exits while its payload is unread.
    enter()
    tensor = filled(1, [4])
    sent = payload(tensor)
    print(sent[7].hex(), sent[11].hex(), flush=True)
    sys.exit(0)

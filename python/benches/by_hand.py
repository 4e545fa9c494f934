"""The side "by hand" of figures.py: a state dict by PyTorch's exchange functions and the driver's IPC calls alone (by_hand.c).

It keeps no lease, orders no stream and finds no mistake: the least that a hand-over of PyTorch tensors takes.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 60
# Of by_hand.c.
HEADER = struct.Struct("IIQ")
BLOCK = struct.Struct("QQ64s")
TIME = struct.Struct("d")
MOST_TENSORS = 4096
MESSAGE_BYTES = 4 << 20


class Driver(ctypes.Structure):
    _fields_ = [("range", ctypes.c_void_p), ("handle", ctypes.c_void_p)]


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class Code:
    """The functions of by_hand.c, of PyTorch and of the driver."""

    def __init__(self, library: str) -> None:
        import torch

        self.c = ctypes.PyDLL(library)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self.api = ctypes.c_void_p(pointer(getattr(torch.Tensor, "__dlpack_c_exchange_api__"), b"dlpack_exchange_api"))
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
        self.cuda.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        self.c.describe.restype = self.c.make.restype = ctypes.c_int64
        self.kept = (ctypes.c_void_p * MOST_TENSORS)()
        self.message = ctypes.create_string_buffer(MESSAGE_BYTES)

    def describe(self, state: dict[str, Any], has_handles: bool) -> memoryview:
        """Returns the message, and takes a reference to each tensor."""
        address = ctypes.cast(self.cuda.cuMemGetAddressRange_v2, ctypes.c_void_p)
        handle = ctypes.cast(self.cuda.cuIpcGetMemHandle, ctypes.c_void_p) if has_handles else None
        driver = Driver(address, handle)
        written = self.c.describe(self.api, ctypes.byref(driver), ctypes.py_object(state), self.message, self.kept)
        assert 0 < written < MESSAGE_BYTES
        return memoryview(self.message)[:written]

    def release(self, count: int) -> None:
        self.c.release(self.kept, ctypes.c_int64(count))

    def make(self, message: bytes, bases: dict[int, int]) -> dict[str, Any]:
        """Opens the blocks that are not open, and returns a tensor for each one of the message."""
        _, count, at = HEADER.unpack_from(message)
        here = (ctypes.c_uint64 * count)()
        for i in range(count):
            base, _, handle = BLOCK.unpack_from(message, at + i * BLOCK.size)
            if base not in bases:
                opened = ctypes.c_uint64()
                found = Handle.from_buffer_copy(handle)
                assert self.cuda.cuIpcOpenMemHandle_v2(ctypes.byref(opened), found, 1) == 0
                bases[base] = opened.value
            here[i] = bases[base]
        state: dict[str, Any] = {}
        assert self.c.make(self.api, ctypes.c_char_p(message), here, 0, ctypes.py_object(state)) >= 0
        return state


def receive(pipe: Any, library: str) -> None:
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda:0")
    code = Code(library)
    pipe.send_bytes(TIME.pack(0))
    kept: list[dict[str, Any]] = []
    bases: dict[int, int] = {}
    while pipe.poll(SECONDS) and (message := pipe.recv_bytes()) != b"end":
        if message == b"drop":
            kept.clear()
            gc.collect()
            for base in bases.values():
                assert code.cuda.cuIpcCloseMemHandle(base) == 0
            bases.clear()
            pipe.send_bytes(TIME.pack(0))
        else:
            begun = time.perf_counter_ns()
            kept.append(code.make(message, bases))
            pipe.send_bytes(TIME.pack((time.perf_counter_ns() - begun) / 1e3))


def compile_into(directory: str) -> str | None:
    """Returns the path of the library, or `None` without a C compiler."""
    library = f"{directory}/by_hand.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, str(Path(__file__).with_suffix(".c"))]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        return None
    return library


class ByHand:
    """A sender, with a receiver process."""

    def __init__(self) -> None:
        import torch.multiprocessing as multiprocessing

        self.directory = tempfile.TemporaryDirectory()
        library = compile_into(self.directory.name)
        if library is None:
            raise FileNotFoundError("there is no C compiler (cc)")
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receive, args=(theirs, library), daemon=True)
        self.process.start()
        theirs.close()
        self.code = Code(library)
        self.answer()
        self.held = 0
        # Microseconds to describe the tensors, and to make those of the receiver.
        self.parts: list[tuple[float, float]] = []

    def answer(self) -> float:
        assert self.pipe.poll(SECONDS), "the receiver does not answer"
        (microseconds,) = TIME.unpack(self.pipe.recv_bytes())
        return float(microseconds)

    def hand_over(self, state: dict[str, Any], is_first: bool) -> None:
        begun = time.perf_counter_ns()
        message = self.code.describe(state, is_first)
        described = (time.perf_counter_ns() - begun) / 1e3
        self.pipe.send_bytes(message)
        self.parts.append((described, self.answer()))
        self.held = len(state)

    def release(self) -> None:
        """Gives back the references of the last hand-over."""
        self.code.release(self.held)
        self.held = 0

    def drop(self) -> None:
        self.pipe.send_bytes(b"drop")
        self.answer()
        self.release()

    def end(self) -> None:
        self.pipe.send_bytes(b"end")
        self.process.join(SECONDS)
        self.directory.cleanup()

"""``python -m device_ipc keep``: keeps the tensors of safetensors files, or the processed weights of an engine, in device memory, for
processes that start and end as they like.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import device_ipc

from . import _backends, _native
from ._weight_keeper import WeightKeeper

MAX_HEADER = 16 << 20
"""The maximum length of a header in bytes."""

PIECE = 16 << 20
"""The bytes of a file that are in host memory at a time."""

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
    "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
}  # fmt: skip
"""The element types of safetensors, and the library's names."""


class Stored(NamedTuple):
    """A tensor in a file, which begins at the byte ``begin``."""

    file: BinaryIO
    name: str
    dtype: str
    shape: list[int]
    begin: int
    nbytes: int


def files(paths: list[str]) -> Iterator[str]:
    """Yields the files, and all files ``*.safetensors`` of directories."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        found = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        if not found:
            raise ValueError(f"{path} contains no file *.safetensors")
        yield from (os.path.join(path, name) for name in found)


def opened(path: str) -> BinaryIO:
    """Opens a regular file. A pipe is opened without a wait for its writer, and refused."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file")
    return file


def read_header(path: str, file: BinaryIO) -> list[Stored]:
    """Reads the header of a file, and checks it against the length of the file before any device memory is allocated."""
    invalid = f"{path} is not a valid safetensors file"
    total = os.fstat(file.fileno()).st_size
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if total < 8 or length > total - 8:
        raise ValueError(f"{invalid}: it has {total} B; it is truncated, or of another format")
    if length > MAX_HEADER:
        raise ValueError(f"{path} has a header of {length} B, and the maximum is {MAX_HEADER} B; divide the file into several")
    try:
        header = json.loads(os.pread(file.fileno(), length, 8))
        header.pop("__metadata__", None)
        entries = [(name, one["dtype"], list(one["shape"]), *one["data_offsets"]) for name, one in header.items()]
        entries.sort(key=lambda one: one[3:])
        numbers = [number for _, _, shape, begin, end in entries for number in (*shape, begin, end)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{invalid}: {error}") from None
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{invalid}: a size or an offset is not a number")
    stored, position = [], 0
    for name, dtype, shape, begin, end in entries:
        if dtype not in DTYPES:
            raise ValueError(f"{path}: tensor {name!r} has the element type {dtype}, which is not supported; convert it")
        if begin != position or end < begin:
            raise ValueError(f"{invalid}: the bytes of {name!r} do not follow those of the tensor before")
        if 8 * (end - begin) != math.prod(shape) * (8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])):
            raise ValueError(f"{invalid}: tensor {name!r} has {end - begin} B, which its shape {shape} contradicts")
        position = end
        stored.append(Stored(file, name, DTYPES[dtype], shape, 8 + length + begin, end - begin))
    if 8 + length + position != total:
        raise ValueError(f"{invalid}: its header describes {8 + length + position} B, and it has {total} B; download it again")
    return stored


def writer(device: str) -> Callable[[device_ipc.Tensor, int, memoryview], None]:
    """Returns a function that copies bytes of the host to an offset of a tensor in bytes."""
    if _backends.is_host(device):
        import numpy

        def write(tensor: device_ipc.Tensor, offset: int, piece: memoryview) -> None:
            numpy.from_dlpack(tensor.bytes)[offset : offset + len(piece)] = numpy.frombuffer(piece, numpy.uint8)

        return write
    try:
        import torch
    except ImportError:
        raise ValueError(f"copies to {device} need PyTorch; install it, or use the program device-ipc") from None
    module: Any = torch

    def write_torch(tensor: device_ipc.Tensor, offset: int, piece: memoryview) -> None:
        target = module.from_dlpack(tensor.bytes)[offset : offset + len(piece)]
        target.copy_(module.frombuffer(piece, dtype=module.uint8))

    return write_torch


def load(arguments: argparse.Namespace) -> device_ipc.Export:
    """Copies the tensors of the files to one block of device memory, and shares them."""
    found: dict[str, Stored] = {}
    opened_files: list[BinaryIO] = []
    try:
        for path in files(arguments.files):
            opened_files.append(opened(path))
            for one in read_header(path, opened_files[-1]):
                if found.setdefault(one.name, one) is not one:
                    raise ValueError(f"tensor {one.name!r} is in two files, also in {path}; name the files of one model, each once")
        if not found:
            raise ValueError("the files contain no tensor; check that they are those of the model")
        layouts = [(one.shape, one.dtype) for one in found.values()]
        tensors = _native._empty_block(layouts, arguments.device, not arguments.writable)
        write = writer(tensors[0].device)
        buffer = memoryview(bytearray(min(PIECE, max(one.nbytes for one in found.values()) or 1)))
        for tensor, one in zip(tensors, found.values(), strict=True):
            for offset in range(0, one.nbytes, len(buffer)):
                piece = buffer[: min(len(buffer), one.nbytes - offset)]
                read = 0
                while read < len(piece):
                    count = os.preadv(one.file.fileno(), [piece[read:]], one.begin + offset + read)
                    if count == 0:
                        raise ValueError(f"the file of tensor {one.name!r} was truncated while it was read")
                    read += count
                write(tensor, offset, piece)
    finally:
        for file in opened_files:
            file.close()
    access: Any = "rw" if arguments.writable else "r"
    return device_ipc.share(dict(zip(found, tensors, strict=True)), access=access, allow_users=arguments.allow_user)


def report(keeper: device_ipc.Keeper, export: device_ipc.Export) -> None:
    """Prints what is kept."""
    print(f"process {os.getpid()} keeps version {keeper.version}: {export.nbytes} B; open it as keeper:{keeper.name}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("files", nargs="*", metavar="FILE|DIRECTORY", help="safetensors files of one model, or a directory of them")
    parser.add_argument("--empty", action="store_true", help="keep the weights that the first engine of vLLM publishes, for all engines")
    parser.add_argument("--name", required=True, help="processes open the weights as keeper:NAME")
    parser.add_argument("--device", help="device to load to, by the name that `devices` prints; by default the first")
    parser.add_argument("--writable", action="store_true", help="share the weights read-write")
    parser.add_argument("--allow-user", type=int, action="append", default=[], metavar="UID", help="a further user that may open them")


def take_signals() -> None:
    """Leaves SIGINT and SIGTERM to the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def run(arguments: argparse.Namespace) -> None:
    """Keeps the tensors until SIGINT or SIGTERM; SIGHUP loads the files again."""
    if arguments.empty == bool(arguments.files):
        raise ValueError("pass the files of a model, or --empty for the weights that an engine publishes")
    if arguments.empty and (arguments.device or arguments.writable):
        raise ValueError("--empty takes neither --device, which is the publishing engine's, nor --writable: engines only read")
    # A signal writes its number to the pipe, whichever thread receives it.
    reader, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGHUP, lambda *_: None)
    if arguments.empty:
        with WeightKeeper(arguments.name, allow_users=arguments.allow_user):
            take_signals()
            print(f"process {os.getpid()} keeps what an engine publishes to keeper:{arguments.name}", flush=True)
            while os.read(reader, 1)[0] == signal.SIGHUP:
                pass
        return
    export = load(arguments)
    keeper = device_ipc.keep(arguments.name, export, allow_users=arguments.allow_user)
    take_signals()
    report(keeper, export)
    while os.read(reader, 1)[0] == signal.SIGHUP:
        try:
            replaced = load(arguments)
        except (device_ipc.Error, OSError, ValueError) as error:
            print(f"the present version stays: {error}", file=sys.stderr, flush=True)
            continue
        keeper.replace(replaced)
        # Its drop notifies the processes that have it open.
        export = replaced
        report(keeper, export)
    keeper.close()
    for holder in export.holders():
        print(f"process {holder.pid} ({holder.program}) still uses the weights", flush=True)

"""The allocation functions for torch.cuda.MemPool, on the simulated CUDA driver."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Start
from test_share import finish, line, tell

TARGET = os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[2] / "target")
SIMULATOR = Path(TARGET) / "debug" / "libdevice_ipc_sim_cuda.so"

# The functions as PyTorch calls them, and the driver as PyTorch uses it.
FUNCTIONS = """
import ctypes, os, random
from device_ipc import _native
from device_ipc._torch_pool import pool_blocks

MIB = 1 << 20
library = ctypes.CDLL(_native.__file__)
alloc, free = library.device_ipc_torch_alloc, library.device_ipc_torch_free
alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
cuda = ctypes.CDLL(os.environ["DEVICE_IPC_CUDA_LIBRARY"])

def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert status == 0, (name, status)

def enter(device):
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    return context

def fill(ptr, value, number):
    return cuda.cuMemsetD32_v2(ctypes.c_uint64(ptr), value, ctypes.c_size_t(number))

def read(ptr):
    found = ctypes.c_uint32()
    call("cuMemcpyDtoH_v2", ctypes.byref(found), ctypes.c_uint64(ptr), ctypes.c_size_t(4))
    return found.value

def free_memory():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value

class Array:
    def __init__(self, ptr, elements):
        self.__cuda_array_interface__ = {
            "shape": (elements,), "typestr": "<u4", "data": (ptr, False), "version": 3, "strides": None
        }
"""


@pytest.fixture
def simulated(start: Start) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a program on simulated CUDA devices."""
    if not SIMULATOR.exists():
        pytest.skip(f"{SIMULATOR} does not exist; build it: cargo build -p device-ipc-sim-cuda")

    def started(program: str, *arguments: str, machine: str = "devices=2;memory=4GiB") -> "subprocess.Popen[str]":
        return start(
            FUNCTIONS + program,
            *arguments,
            DEVICE_IPC_BACKEND="cuda",
            DEVICE_IPC_CUDA_LIBRARY=str(SIMULATOR),
            DEVICE_IPC_SIM_CUDA=machine,
        )

    return started


EXPORTER = """
enter(0)
_native._pool_prepare(0, 512 * MIB)
# PyTorch asks for segments of 2 MiB for tensors of 1 MiB.
segments = [alloc(2 * MIB, 0, None) for _ in range(500)]
assert len(pool_blocks()) == 2, pool_blocks()
arrays = {}
for number, segment in enumerate(segments):
    for half in range(2):
        ptr = segment + half * MIB
        assert fill(ptr, 2 * number + half, 1) == 0
        arrays[f"layer.{2 * number + half}"] = Array(ptr, MIB // 4)
export = d.share(arrays, access=sys.argv[1])
print(export, flush=True)
sys.stdin.readline()
export.close(timeout=30)
for segment in segments:
    free(segment, 2 * MIB, 0, None)
assert pool_blocks() == []
"""


def test_thousand_tensors_are_opened_as_two_blocks(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    exporter = simulated(EXPORTER, "rw")
    importer = simulated(
        """
enter(1)
with d.open(sys.argv[1], device="cuda:1") as mapping:
    assert len(mapping) == 1000
    print([region.nbytes for region in mapping.regions], flush=True)
    for number in (0, 1, 511, 512, 999):
        tensor = mapping[f"layer.{number}"]
        assert tensor.device == "cuda:1" and read(tensor.ptr) == number, number
    assert fill(mapping["layer.7"].ptr, 70, 1) == 0
""",
        line(exporter),
    )
    assert line(importer) == str([512 << 20] * 2)
    finish(importer)
    tell(exporter, "end")
    finish(exporter)


def test_read_only_importer_cannot_write(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    exporter = simulated(EXPORTER, "r")
    importer = simulated(
        """
enter(0)
try:
    d.open(sys.argv[1], access="rw")
except PermissionError:
    print("refused", flush=True)
with d.open(sys.argv[1], device="cuda:0") as mapping:
    assert mapping.read_only and read(mapping["layer.999"].ptr) == 999
    assert fill(mapping["layer.999"].ptr, 1, 1) == 1, "CUDA_ERROR_INVALID_VALUE"
    assert read(mapping["layer.999"].ptr) == 999
""",
        line(exporter),
    )
    assert line(importer) == "refused"
    finish(importer)
    tell(exporter, "end")
    finish(exporter)


def test_segments_do_not_overlap_and_memory_goes_back(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    program = simulated(
        """
enter(0)
_native._pool_prepare(0, 64 * MIB)
_native._pool_prepare(1, 64 * MIB)
before = free_memory()
chance = random.Random(1)
segments = {}
for step in range(2000):
    if segments and chance.random() < 0.5:
        ptr = chance.choice(list(segments))
        length, device = segments.pop(ptr)
        free(ptr, length, device, None)
    else:
        length, device = chance.choice([1, 2 * MIB, 20 * MIB, 22 * MIB, 100 * MIB]), chance.randrange(2)
        ptr = alloc(length, device, None)
        if ptr is None:
            continue
        assert ptr % (2 * MIB) == 0
        segments[ptr] = (length, device)
    ends = sorted((ptr, ptr + length) for ptr, (length, _) in segments.items())
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:])), "segments overlap"
    blocks = pool_blocks()
    for ptr, (length, device) in segments.items():
        assert any(
            b.ptr <= ptr and ptr + length <= b.ptr + b.nbytes and b.device == f"cuda:{device}" for b in blocks
        )
    assert all(0 < block.used <= block.nbytes for block in blocks)
for ptr, (length, device) in segments.items():
    free(ptr, length, device, None)
assert pool_blocks() == []
assert free_memory() == before
print("done", flush=True)
"""
    )
    assert line(program) == "done"
    finish(program)


def test_gaps_are_reused(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    program = simulated(
        """
enter(0)
_native._pool_prepare(0, 16 * MIB)
segments = [alloc(2 * MIB, 0, None) for _ in range(8)]
assert len(pool_blocks()) == 1
# The gap of two in the middle is whole again, in whatever order they are freed.
for first, second in ((3, 4), (4, 3)):
    free(segments[first], 2 * MIB, 0, None)
    free(segments[second], 2 * MIB, 0, None)
    assert alloc(4 * MIB, 0, None) == segments[3]
    free(segments[3], 4 * MIB, 0, None)
    assert [alloc(2 * MIB, 0, None) for _ in range(2)] == segments[3:5]
# The smallest gap is used first.
free(segments[0], 2 * MIB, 0, None)
for number in (5, 6):
    free(segments[number], 2 * MIB, 0, None)
assert alloc(2 * MIB, 0, None) == segments[0]
assert alloc(4 * MIB, 0, None) == segments[5]
assert len(pool_blocks()) == 1 and pool_blocks()[0].used == 16 * MIB
# What was never allocated is ignored.
free(segments[1] + MIB, 2 * MIB, 0, None)
free(12345, 2 * MIB, 0, None)
assert pool_blocks()[0].used == 16 * MIB
print("done", flush=True)
"""
    )
    assert line(program) == "done"
    finish(program)


def test_without_memory_the_result_is_null(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    program = simulated(
        """
enter(0)
_native._pool_prepare(0, 512 * MIB)
assert alloc(512 * MIB, 0, None)
# Not another 512 MiB, but what is needed.
small = alloc(20 * MIB, 0, None)
assert small and sorted(block.nbytes for block in pool_blocks()) == [20 * MIB, 512 * MIB]
assert alloc(600 * MIB, 0, None) is None
assert alloc(-1, 0, None) is None and alloc(2 * MIB, 7, None) is None and alloc(1 << 62, 0, None) is None
assert len(pool_blocks()) == 2
free(small, 20 * MIB, 0, None)
assert len(pool_blocks()) == 1
try:
    _native._pool_prepare(7, MIB)
except d.PlacementError as error:
    print(error, flush=True)
""",
        machine="devices=1;memory=600MiB",
    )
    assert "7" in line(program)
    finish(program)


def test_context_of_the_caller_is_restored(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    program = simulated(
        """
mine = enter(0)
current = ctypes.c_void_p()
_native._pool_prepare(1, 16 * MIB)
ptr = alloc(2 * MIB, 1, None)
call("cuCtxGetCurrent", ctypes.byref(current))
assert current.value == mine.value
assert pool_blocks()[0].device == "cuda:1"
free(ptr, 2 * MIB, 1, None)
call("cuCtxGetCurrent", ctypes.byref(current))
assert current.value == mine.value
print("done", flush=True)
"""
    )
    assert line(program) == "done"
    finish(program)


def test_free_waits_for_the_work_of_the_device(simulated: Callable[..., "subprocess.Popen[str]"]) -> None:
    program = simulated(
        """
import threading
enter(0)
_native._pool_prepare(0, 16 * MIB)
kept, ptr = alloc(2 * MIB, 0, None), alloc(2 * MIB, 0, None)
stream = ctypes.c_void_p()
call("cuStreamCreate", ctypes.byref(stream), 1)
# The stream waits for a value, and then writes the segment.
call("cuStreamWaitValue64_v2", stream, ctypes.c_uint64(kept), ctypes.c_uint64(1), 0)
call("cuMemsetD32Async", ctypes.c_uint64(ptr), 5, ctypes.c_size_t(1), stream)
freed = threading.Event()
thread = threading.Thread(target=lambda: (free(ptr, 2 * MIB, 0, None), freed.set()))
thread.start()
assert not freed.wait(0.2)
other = ctypes.c_void_p()
call("cuStreamCreate", ctypes.byref(other), 1)
call("cuStreamWriteValue64_v2", other, ctypes.c_uint64(kept), ctypes.c_uint64(1), 0)
assert freed.wait(30)
thread.join(30)
assert read(ptr) == 5  # the block is allocated as long as `kept` is
print("done", flush=True)
"""
    )
    assert line(program) == "done"
    finish(program)

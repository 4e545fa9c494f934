"""device_ipc.torch.install() on the mock: PyTorch's payloads of CUDA tensors, over CPU storages in memory of the mock.

The methods for NPUs are tested by a stand-in for torch_npu: the same code replaces them.
"""

import gc
import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from conftest import profiled

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc._torch_install
import torch_over_mock as mock
from torch_over_mock import Receiver, filled, payload, rebuild_cuda_tensor

METHODS = ["_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"]


exports_before = 0


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    global exports_before
    # Payloads that a test leaves unopened stay until the end of all tests.
    mock.enter(payload_lifetime=3600)
    storages = device_ipc._torch_install._storages
    others = device_ipc.counters()["exports"] - len(storages)
    exports_before = device_ipc.counters()["exports"]
    yield
    gc.collect()
    torch.cuda.ipc_collect()
    mock.leave()
    eventually("exports", others, lambda: device_ipc.counters()["exports"] - len(storages))


@pytest.fixture(scope="module")
def started() -> Iterator["list[Receiver]"]:
    """The processes of all tests: importing torch takes seconds."""
    started: "list[Receiver]" = []
    yield started
    for one in started:
        one.close()


@pytest.fixture
def receivers(started: "list[Receiver]") -> Iterator[Callable[[], Receiver]]:
    """Returns processes that a test has for itself."""
    free = [one for one in started if one.process.is_alive()]

    def take() -> Receiver:
        if not free:
            free.append(Receiver())
            started.append(free[-1])
        return free.pop()

    yield take
    for one in started:
        if one.process.is_alive():
            one.ask("reset")


@pytest.fixture
def receiver(receivers: Callable[[], Receiver]) -> Receiver:
    return receivers()


def eventually(what: str, expected: object, value: Callable[[], object]) -> None:
    """Waits until a value is the expected one."""
    until = time.monotonic() + 100
    while (found := value()) != expected:
        assert time.monotonic() < until, f"{what}: expected {expected!r}, found {found!r}"
        time.sleep(0.01)


def exports() -> int:
    """Returns the number of exports that the test has added."""
    return device_ipc.counters()["exports"] - exports_before


def test_handle_is_equal_in_all_payloads_of_a_storage_and_is_no_handle_of_torch() -> None:
    tensor = filled(1, [4, 4])
    first, second = payload(tensor), payload(tensor[2:].t())
    assert first[7] == second[7]
    assert first[7].startswith((b"DIPB", b"DIPC")) and len(first[7]) != 64
    assert first[11] != second[11] and len(first[11]) <= 100
    assert [type(value) for value in first[6:]] == [int, bytes, int, int, bool, bytes, int, bytes, bool]
    assert first[8:10] == (tensor.untyped_storage().nbytes(), 0)


def test_tensors_of_one_storage_arrive_in_one_storage(receiver: Receiver) -> None:
    flat = filled(0, [4096], torch.uint8)
    parts = [
        flat[:64].view(torch.float32),
        flat[64:128].view(torch.bfloat16),
        flat[128:160].view(torch.float8_e4m3fn),
        torch.nn.Parameter(flat[256:512].view(torch.float32).view(8, 8).t()),
        torch.nn.Parameter(flat[512:1024].view(torch.int64), requires_grad=False),
        flat[1024:1024],
    ]
    for number, part in enumerate(parts):
        with torch.no_grad():
            part.copy_(torch.full(part.shape, number + 1).to(part.dtype))
    before = receiver.ask("counters")["driver_opens_total"]
    opened = [receiver.ask("open", payload(part)) for part in parts]
    assert [one[0] for one in opened] == [16, 64, 96, 256, 320, 0]
    assert [one[1] for one in opened] == ["Tensor"] * 3 + ["Parameter"] * 2 + ["Tensor"]
    assert [one[2] for one in opened] == [False, False, False, True, False, False]
    assert opened[3][3] == (1, 8)
    assert len({one[4] for one in opened}) == 1 and opened[0][5] == 4096
    assert receiver.ask("counters")["driver_opens_total"] - before == 1
    # Writes of both sides are seen by both.
    receiver.ask("add", 0, 2.0)
    assert parts[0].sum().item() == 48
    parts[0].fill_(5)
    assert receiver.ask("open", payload(parts[0]))[0] == 80


def requests(receiver: Receiver) -> "tuple[int, int]":
    """Returns the numbers of requests and of opens by the driver."""
    counters = receiver.ask("counters")
    return counters["requests_total"], counters["driver_opens_total"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_storages_of_one_block_share_requests(receiver: Receiver, is_kept: bool) -> None:
    before_all = len(device_ipc._torch_install._storages)
    tensors = mock.in_one_block(300)
    payloads = [payload(tensor) for tensor in tensors]
    if not is_kept:
        # The sender looks for storages that it no longer uses before the receiver opens them.
        tensors.clear()
        torch.cuda.ipc_collect()
    before = requests(receiver)
    assert receiver.ask("open_all", payloads) == 300 * 128
    after = requests(receiver)
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
    # Each storage has a lifetime of its own.
    tensors.clear()
    receiver.ask("drop", 200)
    eventually("storages", before_all + 100, lambda: torch.cuda.ipc_collect() or len(device_ipc._torch_install._storages))
    receiver.ask("drop")
    eventually("exports", 0, exports)


def test_new_storage_in_an_open_block_takes_no_request(receiver: Receiver) -> None:
    tensors = mock.in_one_block(8)
    assert receiver.ask("open", payload(tensors[0]))[0] == 128
    before = requests(receiver)
    for tensor in tensors[1:]:
        assert receiver.ask("hold", tensor) == 128
    assert requests(receiver) == before
    # The receiver closes the block, whose last storage the sender keeps until then.
    tensors.clear()
    del tensor
    receiver.ask("drop")
    eventually("exports", 0, lambda: torch.cuda.ipc_collect() or exports())


def test_storage_is_released_after_the_device_work_of_its_receiver(receiver: Receiver) -> None:
    storages = device_ipc._torch_install._storages
    before = len(storages)
    tensors = mock.in_one_block(2)
    for tensor in tensors:
        receiver.ask("open", payload(tensor))
    receiver.ask("begin_work")
    # The other storage keeps the lease on the block in use, so that only the claim keeps this one.
    del tensor, tensors[0]
    receiver.ask("drop", 1)
    for _ in range(100):
        receiver.ask("pid")
        torch.cuda.ipc_collect()
        assert len(storages) == before + 2
    receiver.ask("end_work")
    eventually("storages", before + 1, lambda: torch.cuda.ipc_collect() or len(storages))


def test_last_storage_of_a_block_stays_while_the_block_is_open(receiver: Receiver) -> None:
    storages = device_ipc._torch_install._storages
    before = len(storages)
    (tensor,) = mock.in_one_block(1)
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    arguments = payload(tensor)
    receiver.ask("open", arguments)
    receiver.ask("open_block", arguments)
    del tensor
    receiver.ask("drop", 1)
    eventually("storages", before, lambda: torch.cuda.ipc_collect() or len(storages))
    assert exports() == 1 and not storage.expired()
    receiver.ask("drop")
    eventually("exports", 0, exports)
    assert storage.expired()


def test_last_storage_of_a_block_is_freed_without_a_further_call() -> None:
    program = """
import device_ipc, numpy, threading, torch, torch_over_mock as m, weakref

m.enter()
receiver = m.Receiver()
array = numpy.from_dlpack(device_ipc.empty((128,), "float32", "mock:0"))
tensor = torch.from_numpy(array)
freed = threading.Event()
weakref.finalize(array, freed.set)
receiver.ask("open", m.payload(tensor))
del array, tensor
# The receiver keeps the block in its cache, and returns it when the sender has dropped it: the sender's interpreter has no part in that.
receiver.ask("drop")
print("freed" if freed.wait(60) else "kept")
receiver.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=Path(__file__).parent
    )
    assert (done.returncode, done.stdout.strip()) == (0, "freed"), done.stderr


def test_payloads_that_nobody_opens_fill_a_table_and_are_refused_then() -> None:
    program = """
import device_ipc, torch_over_mock as m
m.enter()
one, two = m.in_one_block(2)
error = None
for sent in range(70_000):
    try:
        m.payload(one)
    except device_ipc.Error as raised:
        error = raised
        break
assert "shorter payload_lifetime" in str(error) and sent > 60_000, (sent, error)
# A storage that was not shared before has an export of its own then.
receiver = m.Receiver()
assert receiver.ask("hold", two) == 128 and m.payload(two)[7].startswith(b"DIPC")
receiver.close()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=Path(__file__).parent
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_more_receivers_than_a_table_shows_keep_the_block_open() -> None:
    program = """
import device_ipc, gc, time, torch, torch_over_mock as m
from device_ipc._torch_install import _storages

m.enter()
# Before this process has threads.
receivers = [m.Receiver("fork") for _ in range(47)]

def opened(tensor):
    sent = m.payload(tensor)
    assert all(one.ask("open", sent)[0] == 128 for one in receivers)

def requests():
    return [receivers[number].ask("counters")["requests_total"] for number in (0, 46)]

tensors = m.in_one_block(4)
opened(tensors[0])
before = requests()
# Nobody here uses the first storage any longer. The table does not show that the last receiver does, but its lease.
del tensors[0]
for one in receivers[:-1]:
    one.ask("drop")
gc.collect()
for _ in range(3):
    torch.cuda.ipc_collect()
    assert len(_storages) == 1
# Storages that are shared later lie in the same block.
for tensor in tensors:
    opened(tensor)
assert requests() == before, (requests(), before)
del tensor
tensors.clear()
for one in receivers:
    one.ask("drop")
deadline = time.monotonic() + 100
while device_ipc.counters()["exports"]:
    assert time.monotonic() < deadline, (len(_storages), device_ipc.counters())
    torch.cuda.ipc_collect()
    time.sleep(0.01)
for one in receivers:
    one.close()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=Path(__file__).parent
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_storages_of_many_blocks_share_requests(receiver: Receiver) -> None:
    tensors = [filled(1, [16, 8]) for _ in range(300)]
    payloads = [payload(tensor) for tensor in tensors]
    before = requests(receiver)
    assert receiver.ask("open_all", payloads) == 300 * 128
    after = requests(receiver)
    # One for the table of claims, and twice as many leases ahead with each open: 1, 1 and 1, 1 and 2, 1 and 4, ... at most 1 and 64, as before if the sequence goes on.
    assert after[0] - before[0] <= 12 and after[1] - before[1] == 300
    tensors.clear()
    receiver.ask("drop")
    torch.cuda.ipc_collect()
    eventually("exports", 0, exports)


def test_single_storage_is_opened_alone(receiver: Receiver) -> None:
    tensors = [filled(1, [16, 8]) for _ in range(10)]
    payloads = [payload(tensor) for tensor in tensors]
    before = requests(receiver)
    # Not in the order in which they were shared.
    assert receiver.ask("open_all", payloads[::-2]) == 5 * 128
    after = requests(receiver)
    assert (after[0] - before[0], after[1] - before[1]) == (5, 5)


def test_each_storage_takes_one_python_call_of_ours() -> None:
    tensors = [filled(1, [4]) for _ in range(20)]
    package = os.path.dirname(device_ipc.__file__)
    calls = []

    def profile(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_name)

    payload(tensors[0])  # starts the thread that looks for unused storages
    opened = profiled(profile, lambda: [rebuild_cuda_tensor(*arguments) for arguments in [payload(tensor) for tensor in tensors]])
    assert calls.count("share") == 20 and calls.count("open") <= 20
    # The wake-up of the thread, if it has just looked.
    assert set(calls) <= {"share", "open", "wake"} and calls.count("wake") <= 5, calls
    del opened


def test_payload_opened_after_its_time_limit_is_stale(receiver: Receiver) -> None:
    device_ipc.torch.install(payload_lifetime=0.2)
    before = len(device_ipc._torch_install._storages)
    tensors = mock.in_one_block(3)
    payloads = [payload(tensor) for tensor in tensors]
    assert receiver.ask("open_all", payloads[:1]) == 128
    del tensors[1:]
    eventually("storages", before + 1, lambda: len(device_ipc._torch_install._storages))
    done, text = receiver.ask_for("open", payloads[1])
    assert not done and "StaleError: the payload is stale" in text, text


def test_index_6_selects_the_device(receiver: Receiver) -> None:
    tensor = filled(3, [8])
    assert payload(tensor)[6] == 0
    assert receiver.ask("open", payload(tensor), 1)[0] == 24
    assert receiver.ask("devices") == ["mock:1"]
    done, text = receiver.ask_for("open", payload(filled(1, [8])), 7)
    assert not done and "PlacementError" in text, text


def test_payload_is_opened_many_times(receivers: Callable[[], Receiver]) -> None:
    tensor = filled(2, [100])
    arguments = payload(tensor)
    group = [receivers() for _ in range(3)]
    assert [one.ask("open", arguments)[0] for one in group] == [200.0] * 3
    # Also by one process that has closed it in between.
    for _ in range(20):
        group[0].ask("drop")
        assert group[0].ask("open", arguments, None, False)[0] == 200
    # And after the sender has dropped it, as long as a process has it open.
    del tensor
    torch.cuda.ipc_collect()
    assert group[0].ask("open", arguments)[0] == 200
    for one in group:
        one.ask("drop")
    eventually("exports", 0, exports)
    done, text = group[0].ask_for("open", arguments)
    assert not done and "StaleError: the payload is stale" in text, text


def test_tensor_dropped_after_the_send_stays_until_it_was_received(receiver: Receiver) -> None:
    arguments = payload(filled(7, [10]))
    gc.collect()
    torch.cuda.ipc_collect()
    assert exports() == 1
    assert receiver.ask("open", arguments)[0] == 70
    torch.cuda.ipc_collect()
    assert exports() == 1
    receiver.ask("drop")
    eventually("exports", 0, exports)


def test_payload_that_is_never_opened_ends() -> None:
    device_ipc.torch.install(payload_lifetime=0.1)
    for _ in range(10):
        payload(filled(1, [4]))
    eventually("exports", 0, exports)


def test_payload_that_was_never_opened_does_not_end_a_tensor_in_use(receiver: Receiver) -> None:
    device_ipc.torch.install(payload_lifetime=0.05)
    tensor = filled(1, [4])
    arguments = payload(tensor)
    time.sleep(0.3)
    assert receiver.ask("open", arguments)[0] == 4


def test_received_tensor_is_sent_on(receivers: Callable[[], Receiver]) -> None:
    first, second = receivers(), receivers()
    tensor = filled(4, [4])
    sent = payload(tensor[1:])
    first.ask("open", sent)
    forwarded = first.ask("forward", 0)
    assert forwarded[7] == sent[7] and forwarded[11] != sent[11]
    # The one that sends it on drops it before it has been received, and so does the first sender.
    del tensor
    first.ask("drop")
    torch.cuda.ipc_collect()
    assert second.ask("open", forwarded)[0] == 12
    second.ask("drop")
    eventually("exports", 0, exports)


@pytest.mark.parametrize("ends", ["earlier", "later"])
def test_received_tensor_is_sent_on_after_another_storage_of_it_ended(receivers: Callable[[], Receiver], ends: str) -> None:
    first, second = receivers(), receivers()
    tensor = filled(4, [4])
    first.ask("open", payload(tensor))
    first.ask("open_apart", payload(tensor), ends == "earlier")
    if ends == "earlier":
        first.ask("drop", 1)
    assert first.ask("devices") == ["mock:0"]
    assert second.ask("open", first.ask("forward", 0))[0] == 16


def test_alias_of_a_received_tensor_is_sent_on(receivers: Callable[[], Receiver]) -> None:
    first, second = receivers(), receivers()
    tensor = filled(4, [4])
    first.ask("open", payload(tensor))
    assert second.ask("open", first.ask("forward_alias", 0))[0] == 16


def test_own_payload_is_the_own_storage() -> None:
    tensor = filled(4, [4])
    arguments = payload(tensor)
    again = rebuild_cuda_tensor(*arguments)
    assert again.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    del tensor, again
    eventually("exports", 0, exports)


def test_queue_sends_tensors_both_ways(receiver: Receiver) -> None:
    total = receiver.ask("hold", filled(2, [5]))
    assert total == 10
    receiver.inbox.put(("send", 0))
    returned = receiver.receive()
    assert receiver.receive() == (True, None)
    # It is the storage that was sent, which the queue's thread has dropped.
    assert returned.sum().item() == 10
    returned.add_(1)
    receiver.ask("add", 0, 1.0)
    assert returned.sum().item() == 20
    for _ in range(20):
        assert receiver.ask("hold", filled(1, [3])) == 3
    receiver.ask("drop")
    del returned
    eventually("exports", 0, exports)


def test_payload_of_a_sender_that_has_exited_is_stale(receiver: Receiver) -> None:
    program = subprocess.run(
        [sys.executable, mock.__file__], capture_output=True, text=True, timeout=200, check=True
    )
    arguments = list(payload(filled(1, [4])))
    arguments[7], arguments[11] = (bytes.fromhex(one) for one in program.stdout.split())
    done, text = receiver.ask_for("open", tuple(arguments))
    assert not done and "StaleError: the payload is stale" in text, text


def test_killed_receiver_gives_the_memory_back(receiver: Receiver) -> None:
    receiver.ask("open", payload(filled(1, [4])))
    torch.cuda.ipc_collect()
    assert exports() == 1
    receiver.kill()
    eventually("exports", 0, exports)


def test_ipc_collect_returns_what_nobody_uses(receiver: Receiver) -> None:
    before = device_ipc.counters()["exported_bytes"]
    for _ in range(5):
        receiver.ask("open", payload(filled(1, [1000])), None, False)
    gc.collect()
    eventually("bytes", before, lambda: torch.cuda.ipc_collect() or device_ipc.counters()["exported_bytes"])


def test_sharing_leaves_no_files_in_shared_memory(receiver: Receiver) -> None:
    receiver.ask("open", payload(filled(1, [4])))
    names = {f"torch_{pid}" for pid in (os.getpid(), receiver.ask("pid"))}
    assert not [name for name in os.listdir("/dev/shm") if any(name.startswith(one) for one in names)]


def test_tensor_that_cannot_be_shared_is_refused_and_not_kept() -> None:
    with pytest.raises(device_ipc.Error, match="not device memory"):
        payload(torch.ones(4))
    assert exports() == 0


def test_storage_without_bytes_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    device_ipc.torch.uninstall()
    calls: "list[Any]" = []

    def share(storage: Any) -> Any:
        calls.append(storage)
        return (0, None, 0, 0, None, 0, None, None)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    device_ipc.torch.install()
    assert payload(torch.empty(0))[7] is None and len(calls) == 1
    device_ipc.torch.uninstall()


def test_payloads_of_torch_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    device_ipc.torch.uninstall()
    calls: "list[tuple[Any, ...]]" = []

    def opened(*arguments: Any) -> Any:
        calls.append(arguments)
        return torch.UntypedStorage(16)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(opened))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", staticmethod(lambda *args: calls.append(args)))
    device_ipc.torch.install()
    handle = b"\2c" + bytes(64)
    arguments = [torch.Tensor, torch.Size([4]), (1,), 0, torch.storage.TypedStorage, torch.float32, 0, handle, 16, 0, False]
    arguments += [b"/torch_1_2_3", 0, bytes(64), True]
    first = rebuild_cuda_tensor(*arguments)
    again = rebuild_cuda_tensor(*arguments)
    assert first.untyped_storage()._cdata == again.untyped_storage()._cdata
    assert calls == [(0, handle, 16, 0, b"/torch_1_2_3", 0, bytes(64), True), (b"/torch_1_2_3", 0)]
    device_ipc.torch.uninstall()


def test_torch_refuses_payloads_of_ours() -> None:
    arguments = payload(filled(1, [4]))
    device_ipc.torch.uninstall()
    # On a machine with a device it says that the handle is of a future version.
    with pytest.raises(RuntimeError):
        rebuild_cuda_tensor(*arguments)


def test_uninstall_restores_the_methods() -> None:
    device_ipc.torch.uninstall()
    before = [getattr(torch.UntypedStorage, name) for name in METHODS]
    own = [name for name in METHODS if name in vars(torch.UntypedStorage)]
    collect = torch.cuda.ipc_collect
    device_ipc.torch.install()
    device_ipc.torch.install()
    assert all(getattr(torch.UntypedStorage, name) is not one for name, one in zip(METHODS, before))
    device_ipc.torch.uninstall()
    assert [getattr(torch.UntypedStorage, name) for name in METHODS] == before
    assert [name for name in METHODS if name in vars(torch.UntypedStorage)] == own
    assert torch.cuda.ipc_collect is collect
    device_ipc.torch.uninstall()


class AllowList(pickle.Unpickler):
    """An unpickler as SGLang's: a list of the classes and functions that may be loaded, of which none is of device_ipc."""

    ALLOWED = {
        "torch.multiprocessing.reductions.rebuild_cuda_tensor",
        "torch.Tensor",
        "torch._tensor.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.Size",
        "torch.storage.TypedStorage",
        "torch.float32",
        "torch.bfloat16",
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.ALLOWED:
            raise RuntimeError(f"Blocked unsafe global: {module}.{name}")
        return super().find_class(module, name)


def test_pickle_has_only_the_globals_of_torch() -> None:
    tensors = [filled(1, [4]), torch.nn.Parameter(filled(1, [4])), filled(1, [8], torch.bfloat16)]
    for tensor in tensors:
        pickled = bytes(ForkingPickler.dumps(tensor))
        again = AllowList(io.BytesIO(pickled)).load()
        assert torch.equal(again, tensor) and type(again) is type(tensor)


def test_forked_child_neither_uses_nor_ends_what_its_parent_shares(receiver: Receiver) -> None:
    tensor = filled(1, [4])
    arguments = payload(tensor)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.cuda.ipc_collect()
            try:
                payload(tensor)
            except device_ipc.ForkedError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert receiver.ask("open", arguments)[0] == 4
    assert exports() == 1


def test_exit_does_not_wait_for_readers() -> None:
    program = "import torch_over_mock as m, sys; m.enter(); t = m.filled(1, [4]); m.payload(t); del t; print('sent')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=Path(__file__).parent
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "sent", "")


def test_thousands_of_sends_leave_nothing_behind(receiver: Receiver) -> None:
    counts = []
    for _ in range(3):
        for _ in range(200):
            assert receiver.ask("hold", filled(1, [5])) == 5
            receiver.ask("drop")
        eventually("exports", 0, exports)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] <= counts[0] + 2, counts


def test_methods_for_npu_are_replaced_by_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    device_ipc.torch.uninstall()
    stock: "list[str]" = []
    names = ["_share_npu_", "_new_shared_npu", "_release_ipc_counter_npu"]
    monkeypatch.setattr(torch.UntypedStorage, names[0], lambda self: stock.append(names[0]), raising=False)
    for name in names[1:]:
        monkeypatch.setattr(torch.UntypedStorage, name, staticmethod(lambda *args, name=name: stock.append(name)), raising=False)
    device_ipc.torch.install()
    tensor = filled(2, [4])
    fields = tensor.untyped_storage()._share_npu_()
    assert fields[1].startswith(b"DIPB") and fields[4].startswith(b"DIPT") and not stock
    assert torch.UntypedStorage._new_shared_npu(*fields)._cdata == tensor.untyped_storage()._cdata
    torch.UntypedStorage._release_ipc_counter_npu(fields[4], fields[5])
    assert not stock
    torch.UntypedStorage._new_shared_npu(0, bytes(67), 16, 0, b"/torch_1", 0, b"", False)
    torch.UntypedStorage._release_ipc_counter_npu(b"/torch_1", 0)
    assert stock == names[1:]
    device_ipc.torch.uninstall()

"""Copies from other hosts: two processes of one host, over the loopback interface.

Tests with NIXL are skipped unless ``DEVICE_IPC_NIXL`` names it or ``.ci/nixl`` has downloaded it.
"""

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import device_ipc
from conftest import Start, suspend

ROOT = Path(__file__).resolve().parents[2]

NO_LIBRARY = {"DEVICE_IPC_NIXL": "/nowhere/libnixl_capi.so"}

LARGE = 512 << 20
"""The bytes of a tensor whose copy takes a while."""

EXPORTER = """
    tensors = {name: d.empty((1000, 7), "float32", "mock:0") for name in ["a", "b.weight"]}
    for number, tensor in enumerate(tensors.values()):
        np.from_dlpack(tensor)[:] = np.arange(7) + number
    export = d.share(tensors)
    print(export, flush=True)
    sys.stdin.read()
    export.close(timeout=30)
    print("closed", flush=True)
"""


@pytest.fixture
def nixl() -> "dict[str, str]":
    """Returns the environment of processes with NIXL: by TCP alone, and on the loopback interface alone."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    downloaded = sorted(target.glob("nixl-*/.nixl_cu1[23].mesonpy.libs/libnixl_capi.so"))
    library = os.environ.get("DEVICE_IPC_NIXL") or (str(downloaded[-1]) if downloaded else None)
    if library is None:
        pytest.skip(f"there is no NIXL in {target}; `.ci/nixl` downloads it")
    return {"DEVICE_IPC_NIXL": library, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "FATAL"}


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output.strip()


@pytest.mark.parametrize("by", ["call", "variable"])
def test_state_dict_is_copied(start: Start, nixl: "dict[str, str]", by: str) -> None:
    if by == "call":
        enable = 'assert d.enable_remote("127.0.0.1").startswith("127.0.0.1:")\n'
        exporter = start(enable + textwrap.dedent(EXPORTER), **nixl)
    else:
        exporter = start(EXPORTER, DEVICE_IPC_REMOTE="127.0.0.1", **nixl)
    importer = start(
        """
        import device_ipc.numpy, device_ipc.torch
        for module in [device_ipc.numpy, device_ipc.torch]:
            for copy, is_copy in [("never", False), ("pulled-if-needed", False), ("pulled", True)]:
                with module.open(sys.argv[1], copy=copy) as tensors:
                    assert tensors._mapping.is_copy is is_copy, (module, copy)
                    for number, name in enumerate(["a", "b.weight"]):
                        assert (np.asarray(tensors[name]) == np.arange(7) + number).all(), (module, copy, name)
                    if is_copy:
                        tensors["a"][:] = 5      # the exporter does not see it
        print("right")
        """,
        line(exporter),
        **nixl,
    )
    assert end(importer) == "right"
    assert end(exporter) == "closed"


def test_tensors_that_exist_are_written(start: Start, nixl: "dict[str, str]") -> None:
    exporter = start(EXPORTER, DEVICE_IPC_REMOTE="127.0.0.1", **nixl)
    importer = start(
        """
        weights = {name: d.empty((1000, 7), "float32", "mock:0") for name in ["a", "b.weight"]}
        reports = []
        for _ in range(3):
            d.pull_into(sys.argv[1], weights, progress=lambda *report: reports.append(report))
            for number, tensor in enumerate(weights.values()):
                array = np.from_dlpack(tensor)
                assert (array == np.arange(7) + number).all()
                array[:] = 9
        assert reports == [(56000, 56000)] * 3, reports
        d.pull_into(sys.argv[1], {"b.weight": weights["a"]})     # some of the tensors
        assert (np.from_dlpack(weights["a"]) == np.arange(7) + 1).all()
        reports = []
        d.open(sys.argv[1], copy="pulled", progress=lambda *report: reports.append(report)).close()
        assert reports and reports[-1][0] == reports[-1][1], reports

        refused = [
            ({"c": weights["a"]}, d.NoSuchTensorError, "c"),
            ({"a": d.empty((7, 1000), "float32", "mock:0")}, d.LayoutError, "float32 [1000, 7]"),
            ({"a": weights["a"], "b.weight": weights["a"]}, d.LayoutError, "overlap"),
        ]
        read_only = np.zeros((1000, 7), "float32")
        read_only.flags.writeable = False
        refused.append(({"a": read_only}, ValueError, "read-only"))
        for tensors, kind, phrase in refused:
            try:
                d.pull_into(sys.argv[1], tensors)
            except kind as error:
                assert phrase in str(error), error
                print("refused", flush=True)
        """,
        line(exporter),
        **nixl,
    )
    assert end(importer).split() == ["refused"] * 4
    assert end(exporter) == "closed"


def test_publications_of_a_ring_are_copied(start: Start, nixl: "dict[str, str]") -> None:
    writer = start(
        """
        ring = d.Ring(d.empty((2, 1024), "uint8", "mock:0"), slots=2)
        print(ring, flush=True)
        ring.wait_readers(2, timeout=30)
        for number in range(100):
            with ring.write(timeout=30) as slot:
                np.from_dlpack(slot)[:] = number
        ring.close(timeout=30)
        print("closed", flush=True)
        sys.stdin.read()
        """,
        DEVICE_IPC_REMOTE="127.0.0.1",
        **nixl,
    )
    text = line(writer)
    reader = """
        copy = "pulled-if-needed" if sys.argv[2] == "opened" else "pulled"
        with d.join(sys.argv[1], copy=copy, timeout=10) as reader:
            for number, slot in enumerate(reader):
                with slot:
                    assert slot.sequence == number and (np.from_dlpack(slot) == number).all(), number
        print(number)
    """
    readers = [start(reader, text, how, **nixl) for how in ["opened", "copied"]]
    assert [end(process) for process in readers] == ["99", "99"]
    assert line(writer) == "closed"
    end(writer)


def test_ring_of_a_killed_writer_ends(start: Start, nixl: "dict[str, str]") -> None:
    writer = start(
        """
        ring = d.Ring(d.empty((512,), "uint8", "mock:0"), slots=2)
        print(ring, flush=True)
        ring.wait_readers(1, timeout=30)
        with ring.write(timeout=30):
            pass
        sys.stdin.read()
        """,
        DEVICE_IPC_REMOTE="127.0.0.1",
        **nixl,
    )
    reader = start(
        """
        with d.join(sys.argv[1], copy="pulled") as reader:
            next(reader).release()
            print("first", flush=True)
            try:
                next(reader)
            except d.GoneError as error:
                print("gone", error)
        """,
        line(writer),
        **nixl,
    )
    assert line(reader) == "first"
    writer.kill()
    answer = end(reader)
    assert answer.startswith("gone") and f"process {writer.pid} of host" in answer, answer


def test_exporter_without_a_network_address_is_reported(start: Start) -> None:
    exporter = start(EXPORTER)
    text = line(exporter)
    with device_ipc.open(text, copy="pulled-if-needed") as mapping:
        assert not mapping.is_copy
    with pytest.raises(device_ipc.UnsupportedError, match=r"no network address.*device_ipc.enable_remote"):
        device_ipc.open(text, copy="pulled")
    end(exporter)


def test_missing_library_error_names_the_remedy(start: Start, nixl: "dict[str, str]") -> None:
    check = """
        try:
            d.enable_remote("127.0.0.1") if len(sys.argv) == 1 else d.open(sys.argv[1], copy="pulled")
        except d.UnsupportedError as error:
            assert "/nowhere/libnixl_capi.so" in str(error) and "pip install nixl-cu13" in str(error), error
            print("refused")
    """
    exporter = start(EXPORTER, DEVICE_IPC_REMOTE="127.0.0.1", **nixl)
    assert end(start(check, line(exporter), **NO_LIBRARY)) == "refused"
    end(exporter)
    assert end(start(check, **NO_LIBRARY)) == "refused"
    by_variable = "try: d.share(d.empty((4,), 'float32', 'mock:0'))\nexcept d.UnsupportedError: print('refused')"
    assert end(start(by_variable, **NO_LIBRARY, DEVICE_IPC_REMOTE="127.0.0.1")) == "refused"


def test_address_of_no_interface_is_refused(start: Start, nixl: "dict[str, str]") -> None:
    program = """
        for address in ["0.0.0.0", "localhost", ""]:
            try:
                d.enable_remote(address)
            except d.Error as error:
                assert "address" in str(error), error
                print("refused", flush=True)
    """
    assert end(start(program, **nixl)).split() == ["refused"] * 3


PULL = """
    import threading
    d.open(sys.argv[1], copy="pulled").close()
    begun = threading.Event()
    def report():                            # on another thread, so that the interpreter lock has to be free
        begun.wait()
        print("begun", flush=True)
    threading.Thread(target=report, daemon=True).start()
    try:
        d.open(sys.argv[2], copy="pulled", timeout=None, progress=lambda copied, total: begun.set())
        print("copied")
    except d.GoneError as error:
        print("gone", error)
    except KeyboardInterrupt:
        print("interrupted")
"""

LARGE_EXPORTER = f"""
    small, large = d.empty((4,), "uint8", "mock:0"), d.empty(({LARGE},), "uint8", "mock:0")
    np.from_dlpack(large)[:] = 3
    exports = [d.share(small), d.share(large)]
    print(*exports, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_copy_ends_with_the_exporter_and_by_ctrl_c(start: Start, nixl: "dict[str, str]", how: str) -> None:
    exporter = start(LARGE_EXPORTER, DEVICE_IPC_REMOTE="127.0.0.1", **nixl)
    importer = start(PULL, *line(exporter).split(), **nixl)
    assert line(importer) == "begun"
    # A suspended exporter cannot finish the copy first.
    suspend(exporter)
    begun = time.monotonic()
    if how == "killed":
        exporter.kill()
        answer = line(importer)
        assert answer.startswith("gone") and f"process {exporter.pid} of host" in answer, answer
    else:
        importer.send_signal(signal.SIGINT)
        assert line(importer) == "interrupted"
    assert time.monotonic() - begun < 20


def test_channel_of_another_host_carries_bytes_and_memory(start: Start) -> None:
    key = "a secret of 16 bytes or more"
    with device_ipc.listen("127.0.0.1:0", key=key.encode()) as listener:
        other = start(
            """
            with d.connect(sys.argv[1], key=sys.argv[2].encode(), timeout=30) as channel:
                received = channel.receive(timeout=30)
                assert received.data == b"weights" and "127.0.0.1" in repr(channel), channel
                with received.open(copy="pulled-if-needed") as mapping:
                    channel.send(bytes(np.from_dlpack(mapping.tensor)), timeout=30)
                channel.close(timeout=30)
            try:
                d.connect(sys.argv[1], key=b"another secret of 16 bytes", timeout=30)
            except d.Error as error:
                print(type(error).__name__, error)
            """,
            listener.address,
            key,
        )
        with listener.accept(timeout=30) as channel:
            tensor = device_ipc.empty((5,), "uint8", "mock:0")
            np.from_dlpack(tensor)[:] = np.arange(5)
            channel.send(b"weights", tensor, timeout=30)
            del tensor
            assert channel.receive(timeout=30).data == bytes(range(5))
            with pytest.raises(device_ipc.GoneError):
                channel.receive(timeout=30)
        error = end(other)
        assert "has another key; use the same key in device_ipc.listen and device_ipc.connect" in error


@pytest.mark.parametrize("mode", ["pulled-if-needed", "pulled"])
def test_memory_of_a_message_is_copied_after_its_sender_dropped_it(
    start: Start, nixl: "dict[str, str]", mode: str
) -> None:
    program = """
        d.enable_remote("127.0.0.1")
        with d.listen("127.0.0.1:0", key=b"a secret of 16 bytes or more") as listener:
            print(listener.address, flush=True)
            with listener.accept(timeout=60) as channel:
                tensor = d.empty((1000,), "float32", "mock:0")
                np.from_dlpack(tensor)[:] = np.arange(1000)
                channel.send(b"weights", tensor, timeout=60)
                del tensor
                channel.close(timeout=60)        # waits until the receiver has copied it
        print("closed")
    """
    sender = start(program, **nixl)
    receiver = start(
        """
        with d.connect(sys.argv[1], key=b"a secret of 16 bytes or more", timeout=60) as channel:
            received = channel.receive(timeout=60)
            mode = sys.argv[2]
            with received.exports[0].open(device="mock:0", copy=mode) as mapping:
                assert mapping.is_copy is (mode == "pulled")
                assert (np.from_dlpack(mapping.tensor) == np.arange(1000)).all()
        print("right")
        """,
        line(sender),
        mode,
        **nixl,
    )
    assert end(receiver) == "right"
    assert end(sender) == "closed"

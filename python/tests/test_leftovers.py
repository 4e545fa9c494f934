"""Variables that still name a tensor after the block that opened its memory."""

import logging
import threading
import warnings

import numpy as np
import pytest

import device_ipc
import device_ipc.numpy
from conftest import Start
from test_share import finish, line, ones, tell


def test_tensor_that_outlives_its_block_is_named(caplog: pytest.LogCaptureFixture) -> None:
    export = device_ipc.share({"a": ones(4), "b": ones(2)})
    with pytest.warns(ResourceWarning, match="'b'"), caplog.at_level(logging.WARNING, "device_ipc"):
        with device_ipc.open(str(export)) as weights:
            for _name, tensor in weights.items():
                pass
    assert "'b'" in caplog.text and "'a'" not in caplog.text
    with pytest.raises(device_ipc.StillHeldError, match='this process holds it by the tensors "b"'):
        export.wait_released(timeout=0)
    with pytest.raises(device_ipc.StillHeldError, match='"b"'):
        export.close(timeout=0)
    del tensor
    export.close(timeout=30)


def test_array_that_outlives_its_block_is_named() -> None:
    export = device_ipc.share({"a": ones(4), "b": ones(2)})
    with pytest.warns(ResourceWarning, match="'a'"):
        with device_ipc.numpy.open(str(export)) as arrays:
            kept = arrays["a"]
    part = kept[:2]
    del kept
    with pytest.warns(ResourceWarning, match="regions"):
        with device_ipc.numpy.open(str(export)) as arrays:
            part = arrays["b"][:1]
    del part
    export.close(timeout=30)


def test_block_without_leftovers_warns_of_nothing() -> None:
    export = device_ipc.share({"a": ones(4), "b": ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with device_ipc.open(str(export)) as weights:
            total = sum(float(np.from_dlpack(tensor).sum()) for tensor in weights.values())
        with device_ipc.numpy.open(str(export)) as arrays:
            total += sum(float(array.sum()) for array in arrays.values())
        # The traceback of an exception names the tensors.
        with pytest.raises(KeyError), device_ipc.open(str(export)) as weights:
            first = weights["a"]
            raise KeyError
        del first
    export.close(timeout=30)


def test_end_of_share_raises_if_this_process_alone_holds_it() -> None:
    with pytest.raises(device_ipc.StillHeldError, match='holds it by the tensors "a"'):
        with device_ipc.share({"a": ones(4)}) as export:
            kept = device_ipc.open(str(export))["a"]
    del kept
    export.close(timeout=30)


def test_wait_for_another_process_is_logged_and_shows_the_holders(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    export = device_ipc.share(ones(4))
    other = start(
        """
        mapping = d.open(sys.argv[1])
        print("open", flush=True)
        input()
        """,
        str(export),
    )
    assert line(other) == "open"
    with caplog.at_level(logging.WARNING, "device_ipc"):
        closing = threading.Thread(target=export.close)
        closing.start()
        logged = threading.Event()
        messages = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                messages.append(record.getMessage())
                logged.set()

        handler = Handler()
        logging.getLogger("device_ipc").addHandler(handler)
        # A call that selects a backend starts the bridge to logging.
        device_ipc.empty((1,), "uint8", "mock:0")
        assert logged.wait(60)
        logging.getLogger("device_ipc").removeHandler(handler)
        assert len(messages) == 1 and f"process {other.pid}" in messages[0] and "waited_ms=5" in messages[0], messages
        assert [holder.pid for holder in export.holders()] == [other.pid]
    tell(other, "end")
    finish(other)
    closing.join(60)
    assert not closing.is_alive() and export.closed

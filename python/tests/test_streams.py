"""Streams of frameworks, by stand-ins: the tests need no GPU and no framework."""

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import device_ipc
from device_ipc import _streams, aio
from test_share import ones


class Kind:
    """`torch.cuda` or `torch.npu` with a current stream, which is that of a thread."""

    def __init__(self, attribute: str) -> None:
        self.attribute, self.initialized, self.entered = attribute, True, []  # type: ignore[var-annotated]

    def is_initialized(self) -> bool:
        return self.initialized

    def current_stream(self, device: "int | None" = None) -> Any:
        return types.SimpleNamespace(**{self.attribute: 100 + (device or 0)})

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.entered.append(stream)
        yield


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ["torch", "cupy", "numba", "numba.cuda.cudadrv.driver"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield monkeypatch


def test_no_framework_has_no_current_stream(frameworks: pytest.MonkeyPatch) -> None:
    assert _streams.current("cuda", 0) is None


def test_current_stream_of_torch(frameworks: pytest.MonkeyPatch) -> None:
    torch = types.SimpleNamespace(cuda=Kind("cuda_stream"), npu=Kind("npu_stream"))
    frameworks.setitem(sys.modules, "torch", torch)
    assert _streams.current("cuda", 1) == 101
    assert _streams.current("npu", 2) == 102
    torch.cuda.initialized = False
    assert _streams.current("cuda", 1) is None, "a framework that does not use the device is not asked"


def test_current_stream_of_cupy_is_that_of_the_device(frameworks: pytest.MonkeyPatch) -> None:
    selected = []

    @contextlib.contextmanager
    def device(ordinal: int) -> Iterator[None]:
        selected.append(ordinal)
        yield

    get = lambda: types.SimpleNamespace(ptr=7 + selected[-1])  # noqa: E731
    cuda = types.SimpleNamespace(Device=device, get_current_stream=get)
    frameworks.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    assert _streams.current("cuda", 3) == 10


@pytest.mark.parametrize(("per_thread", "expected"), [(0, 0), (1, 2)])
def test_default_stream_of_numba(frameworks: pytest.MonkeyPatch, per_thread: int, expected: int) -> None:
    driver = types.SimpleNamespace(is_initialized=False)
    config = types.SimpleNamespace(CUDA_PER_THREAD_DEFAULT_STREAM=per_thread)
    frameworks.setitem(sys.modules, "numba", types.SimpleNamespace(config=config))
    module = types.SimpleNamespace(driver=driver)
    frameworks.setitem(sys.modules, "numba.cuda.cudadrv.driver", module)
    assert _streams.current("cuda", 0) is None
    driver.is_initialized = True
    assert _streams.current("cuda", 0) == expected


def test_call_takes_the_current_stream_of_the_caller_to_its_thread(frameworks: pytest.MonkeyPatch) -> None:
    import asyncio

    torch = types.SimpleNamespace(cuda=Kind("cuda_stream"), npu=None)
    frameworks.setitem(sys.modules, "torch", torch)
    inside: list[Any] = asyncio.run(aio.call(lambda: list(torch.cuda.entered)))
    assert [stream.cuda_stream for stream in inside] == [100]


def test_streams_are_taken_by_any_protocol() -> None:
    stream = device_ipc.Stream("mock:0")
    version, handle = stream.__cuda_stream__()
    assert (version, handle) == (0, stream.handle)
    forms = [
        stream,
        handle,
        types.SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
        types.SimpleNamespace(__cuda_stream__=(0, handle)),
        types.SimpleNamespace(cuda_stream=handle),
        types.SimpleNamespace(npu_stream=handle),
        types.SimpleNamespace(ptr=handle),
        types.SimpleNamespace(handle=ctypes.c_void_p(handle)),
        types.SimpleNamespace(handle=handle),
    ]
    export = device_ipc.share(ones(4), ready=forms)
    for form in forms:
        with device_ipc.open(export.descriptor, device="mock:0", stream=form) as mapping:
            assert mapping.tensor.shape == (4,)
    for wrong in ["legacy", types.SimpleNamespace(handle="0"), object()]:
        with pytest.raises(TypeError, match="is not a stream"):
            device_ipc.open(export.descriptor, stream=wrong)

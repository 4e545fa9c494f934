"""The stream that the framework in use submits its work to. Looks at imported frameworks only, and imports none."""

from __future__ import annotations

import contextlib
import sys


def current(backend: str, device: int) -> int | None:
    """Returns the handle of the current stream of the device, or None where no framework is in use."""
    torch = sys.modules.get("torch")
    if torch is not None:
        kind = getattr(torch, "npu" if backend == "ascend" else "cuda", None)
        if kind is not None and kind.is_initialized():
            stream = kind.current_stream(device)
            return int(stream.npu_stream if backend == "ascend" else stream.cuda_stream)
    if backend != "cuda":
        return None
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    numba = sys.modules.get("numba.cuda.cudadrv.driver")
    if numba is not None and numba.driver.is_initialized:
        # A kernel without a stream runs on the default stream: numba has no other current one.
        config = sys.modules["numba"].config
        return 2 if getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0) else 0
    return None


def carry() -> contextlib.ExitStack:
    """Returns a context that makes this thread's current streams those of another thread."""

    class Streams(contextlib.ExitStack):
        def __enter__(self) -> Streams:
            for context in contexts:
                self.enter_context(context)
            return self

    contexts = []
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    for kind in (getattr(torch, "cuda", None), getattr(torch, "npu", None)):
        if kind is not None and kind.is_initialized():
            contexts.append(kind.stream(kind.current_stream()))
    if cupy is not None:
        contexts += [cupy.cuda.Device(), cupy.cuda.get_current_stream()]
    return Streams()

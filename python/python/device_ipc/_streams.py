"""The stream that the framework in use submits its work to. Looks at imported frameworks only, and imports none."""

from __future__ import annotations

import contextlib
import sys

from . import _backends


def current(kind: str, device: int) -> int | None:
    """Returns the handle of the current stream of the device, or None where no framework is in use.

    ``kind`` is the frameworks' name of the kind of device. PyTorch and its extensions have a module of this name, whose streams have
    their handle in an attribute such as ``cuda_stream``.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            return int(getattr(module.current_stream(device), f"{kind}_stream"))
    if kind != "cuda":
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
    for module in [getattr(torch, kind, None) for kind in _backends.kinds() if kind != "cpu"]:
        if module is not None and module.is_initialized():
            contexts.append(module.stream(module.current_stream()))
    if cupy is not None:
        contexts += [cupy.cuda.Device(), cupy.cuda.get_current_stream()]
    return Streams()

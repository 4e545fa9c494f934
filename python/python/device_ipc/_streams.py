"""The stream that the framework in use submits its work to. Looks at imported frameworks only, and imports none."""

from __future__ import annotations

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
    return None

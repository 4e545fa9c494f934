"""CuPy arrays in memory of CUDA devices. Importing this module does not import CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import _native
from ._views import Views, open_writable

# Without `open`: an import of all names shadows no built-in one.
__all__ = ["Arrays"]


class Arrays(Views):
    """A mapping of names to CuPy arrays in the memory of another process; see ``open``.

    As a context manager, it releases the memory at the end of the block, in the order of its stream. An array that is still in
    use after the block keeps the memory mapped.
    """

    def _import(self, mapping: _native.Mapping) -> dict[str, Any]:
        import cupy

        regions = [cupy.from_dlpack(region) for region in mapping.regions]
        kinds, places = mapping._places()
        sources = [
            (_dtype(cupy, dtype), None if position is None else regions[position].data) for dtype, position in kinds
        ]
        views = {}
        for name, kind, offset, shape, strides in places:
            dtype, region = sources[kind]
            if region is None:
                views[name] = cupy.empty(shape, dtype)
                continue
            size = dtype.itemsize
            steps = None if strides is None else tuple([size * stride for stride in strides])
            views[name] = cupy.ndarray(shape, dtype, region + size * offset, steps)
        return views


def _dtype(cupy: Any, name: str) -> Any:
    """Returns the element type of this name."""
    try:
        return cupy.dtype(name)
    except TypeError:
        raise TypeError(
            f"CuPy has no element type {name}; take the bytes: cupy.from_dlpack(mapping[name].bytes)"
        ) from None


def open(
    descriptor: _native.Descriptor | str | bytes,
    *,
    device: Any = None,
    access: Any = None,
    stream: object | None = None,
    copy: Any = "never",
    timeout: float | None = 30.0,
    allow_users: Sequence[int] = (),
    allow_read_only: bool = False,
    grant: _native.Grant | str | bytes | None = None,
    progress: Callable[[int, int], object] | None = None,
    reserved: bool | tuple[_native.Reservation, int] = False,
) -> Arrays:
    """Opens memory of another process as CuPy arrays.

    CuPy has no read-only arrays. A read-only mapping is refused unless ``allow_read_only`` is true; then a kernel that writes an
    array ends this process's use of the device.

    The parameters are those of ``device_ipc.open``: ``descriptor`` (text, bytes, ``Descriptor`` or ``"keeper:NAME"``), ``device`` (a
    device here or a dict of devices; by default the home device), ``access`` (``"r"`` or ``"rw"``), ``stream`` (the one that waits for the bytes),
    ``copy`` (the condition of a copy, and the way; by default ``"never"``), ``timeout`` (in seconds; ``None`` is no
    limit), ``allow_users`` (further user ids of exporters), ``grant``, ``progress`` (called with the numbers of copied and of all bytes), and
    ``reserved`` (addresses that stay, ``True`` or a pair of a ``Reservation`` and an offset, for ``mapping.suspend``, ``resume``, ``replace`` and ``follow``).
    Raises as ``device_ipc.open``, ``NotPermittedError`` for read-only memory, and ``TypeError`` for an element type that CuPy does not have.
    """
    options = {
        "device": device,
        "access": access,
        "stream": stream,
        "copy": copy,
        "grant": grant,
        "progress": progress,
        "reserved": reserved,
        "timeout": timeout,
        "allow_users": allow_users,
    }
    return Arrays(open_writable("CuPy", descriptor, allow_read_only, **options))

"""NumPy arrays in the memory of the mock, which is memory of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from . import _native
from ._views import Views

# Without `open`: an import of all names shadows no built-in one.
__all__ = ["Arrays"]


class Arrays(Views):
    """A mapping of names to NumPy arrays in the memory of another process; see ``open``.

    As a context manager, it releases the memory at the end of the block. An array that is still in use after the block keeps the
    memory mapped.
    """

    def _import(self, mapping: _native.Mapping) -> dict[str, Any]:
        import numpy

        regions = [numpy.from_dlpack(region) for region in mapping.regions]
        nothing = numpy.empty(0, numpy.uint8)
        kinds, places = mapping._places()
        sources = [
            (_dtype(dtype), nothing if position is None else regions[position]) for dtype, position in kinds
        ]
        views = {}
        for name, kind, offset, shape, strides in places:
            dtype, region = sources[kind]
            size = dtype.itemsize
            steps = None if strides is None else tuple([size * stride for stride in strides])
            views[name] = numpy.ndarray(shape, dtype, region, size * offset, steps)
        return views


def _dtype(name: str) -> Any:
    """Returns the element type of this name: of NumPy, or of ml_dtypes where that is installed."""
    import numpy

    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with NumPy)
    try:
        return numpy.dtype(name)
    except TypeError:
        raise TypeError(
            f"NumPy has no element type {name}; install ml_dtypes, or take the bytes: numpy.from_dlpack(mapping[name].bytes)"
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
    grant: _native.Grant | str | bytes | None = None,
    progress: Callable[[int, int], object] | None = None,
    reserved: bool | tuple[_native.Reservation, int] = False,
) -> Arrays:
    """Opens memory of another process as NumPy arrays, which are read-only where the memory is.

    The parameters are those of ``device_ipc.open``: ``descriptor`` (text, bytes, ``Descriptor`` or ``"keeper:NAME"``), ``device`` (a
    device here or a dict of devices; by default the home device), ``access`` (``"r"`` or ``"rw"``), ``stream`` (the one that waits for the bytes),
    ``copy`` (the condition of a copy, and the way; by default ``"never"``), ``timeout`` (in seconds; ``None`` is no
    limit), ``allow_users`` (further user ids of exporters), ``grant``, ``progress`` (called with the numbers of copied and of all bytes), and
    ``reserved`` (addresses that stay, ``True`` or a pair of a ``Reservation`` and an offset, for ``mapping.suspend``, ``resume``, ``replace`` and ``follow``).
    Raises as ``device_ipc.open``, and ``TypeError`` for an element type that NumPy does not have.
    """
    return Arrays(
        _native.open(
            descriptor,
            device=device,
            access=access,
            stream=stream,
            copy=copy,
            grant=grant,
            progress=progress,
            reserved=reserved,
            timeout=timeout,
            allow_users=allow_users,
        )
    )

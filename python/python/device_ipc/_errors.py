"""Exception classes, one for each kind of the Rust error that has a reaction of its own."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import Holder


class Error(RuntimeError):
    """An error of device_ipc, and the base class of all its exceptions."""


class BackendError(Error):
    """No backend has a device, or the named one cannot be used."""


class UnsupportedError(Error):
    """The backend, or this kind of memory, does not support the operation."""


class DescriptorError(Error, ValueError):
    """The text or the bytes are not a descriptor that this version reads."""


class LayoutError(Error, ValueError):
    """Shape, strides, element type or address do not fit the memory."""


class PlacementError(Error, ValueError):
    """The device or the stream does not fit the memory."""


class GoneError(Error):
    """The process of the other side has exited, or has closed the ring or the channel."""


class HolderDiedError(GoneError):
    """The export is released, but processes died while they used the memory: what they were writing may be incomplete."""

    holders: list[Holder] = []
    """The processes that died."""


class StaleError(Error):
    """The descriptor is out of date: the export was dropped, the memory freed, or the host restarted. Or a ring has dismissed this reader."""


class NotPermittedError(Error, PermissionError):
    """The peer, or the mapping, does not permit the operation."""


class TimeoutError(Error, builtins.TimeoutError):
    """The operation did not finish in time."""


class StillHeldError(TimeoutError):
    """The export was not released in time."""

    holders: list[Holder] = []
    """The processes that hold a lease on the export."""


class NoSuchTensorError(Error, KeyError):
    """No tensor has this name."""

    __str__ = Error.__str__


class OutOfMemoryError(Error, MemoryError):
    """The device has not enough memory."""


class ForkedError(Error):
    """The process was forked from one that used device_ipc."""

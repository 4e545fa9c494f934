"""Exception classes. The predicates are those of the Rust error."""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ._native import Holder


class Error(RuntimeError):
    """An error of device_ipc, and the base class of all its exceptions."""

    is_gone: ClassVar[bool] = False
    """Whether the other side has ended: its process has exited, or it has closed the ring or the channel."""
    is_stale: ClassVar[bool] = False
    """Whether the descriptor is out of date: the export was dropped, the memory freed, or the host restarted."""
    is_timeout: ClassVar[bool] = False
    """Whether the operation did not finish in time."""
    is_not_permitted: ClassVar[bool] = False
    """Whether the peer, or the mapping, does not permit the operation."""


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

    is_gone = True


class HolderDiedError(GoneError):
    """The export is released, but processes died while they used the memory: what they were writing may be incomplete."""

    holders: list[Holder] = []
    """The processes that died."""


class StaleError(Error):
    """The descriptor is out of date: the export was dropped, the memory freed, or the host restarted."""

    is_stale = True


class NotPermittedError(Error, PermissionError):
    """The peer, or the mapping, does not permit the operation."""

    is_not_permitted = True


class TimeoutError(Error, builtins.TimeoutError):
    """The operation did not finish in time."""

    is_timeout = True


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


# What the texts of the library name in Rust, and what does the same in Python. Methods that have the same name are not listed.
_IN_PYTHON = {
    ", or allow them (Ipc::builder().allow_simulated(true))": "",
    "(OpenBuilder::or_pulled, on an Ipc with IpcBuilder::remote)": "(pulled=None)",
    "whose Ipc does not listen (IpcBuilder::remote, Remote::listen)": "which does not listen (device_ipc.enable_remote)",
    "ChannelReceiver::receive": "Channel.receive",
    "Descriptor::home": "Descriptor.homes",
    "DeviceMap::insert": "the argument device",
    "FindBuilder::start": "device_ipc.open",
    "Ipc::allocate_for": "device_ipc.empty",
    "Ipc::connect_tcp": "device_ipc.connect",
    "Ipc::listen_tcp": "device_ipc.listen",
    "Ipc::named": "DEVICE_IPC_BACKEND=",
    "Ipc::open": "device_ipc.open",
    "Ipc::open_ring": "device_ipc.join",
    "Ipc::share": "device_ipc.share",
    "Ipc::share_copy": "device_ipc.share",
    "IpcBuilder::allow": "allow_users",
    "Mapping::tensors": "Mapping.items",
    "Mapping::view": "Mapping.regions",
    "MemoryUse::read_only_importers": "read_only=True",
    "OpenBuilder::access": "the argument access of device_ipc.open",
    "OpenBuilder::at_home": "without the argument device",
    "OpenBuilder::on_device": "the argument device of device_ipc.open",
    "OpenBuilder::or_staged": "staged=True",
    "OpenBuilder::or_pulled": "pulled=None",
    "OpenBuilder::pull_into": "device_ipc.pull_into",
    "OpenBuilder::pulled": "pulled=True",
    "OpenBuilder::staged": "staged=True",
    "Remote::listen": "device_ipc.enable_remote",
    "Ring::wait_writable": "Ring.write",
    "RingOpenBuilder::pulled": "pulled=True",
    "ShareBuilder::access": "the argument access of device_ipc.share",
    "ShareBuilder::exposure(ExposurePolicy::Copy)": 'exposure="copy"',
}
_CALLS = "|".join(re.escape(call) for call in _IN_PYTHON if "(" in call)
_METHOD = re.compile(rf"{_CALLS}|\b[A-Z][A-Za-z]*::[a-z]\w*")


def in_python(text: str) -> str:
    """Returns a text of the library with Python's names of the methods that it names. Those that only Rust has stay as they are."""
    return _METHOD.sub(lambda found: _name_in_python(found[0]), text)


def _name_in_python(method: str) -> str:
    if method in _IN_PYTHON:
        return _IN_PYTHON[method]
    from . import _native

    kind, _, name = method.partition("::")
    return f"{kind}.{name}" if hasattr(getattr(_native, kind, None), name) else method

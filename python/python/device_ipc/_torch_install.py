"""Passes the storages of ``torch.multiprocessing`` through this library; see ``device_ipc.torch.install``.

PyTorch sends a CUDA tensor as a call of ``rebuild_cuda_tensor`` with fifteen arguments. Three methods of
``torch.UntypedStorage`` make and use the eight of them that name memory. They are replaced here, and nothing else, so
that the payloads have PyTorch's form, and code that rewrites or checks them works:

=============== ====================================================================================================
storage_handle  the descriptor of the whole storage, equal in all payloads of it: receivers find their storages by it
storage_offset  0
ref_counter     a grant: the right of this payload to open the memory once, which keeps it until then
event           empty: the memory is ready for the receiver's stream when it is open
=============== ====================================================================================================
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _native
from ._errors import Error, StaleError, UnsupportedError

# Without the types, which PyTorch does not have for all that is used here.
_torch: Any = torch

# The first bytes of descriptors and of grants. PyTorch takes the first byte of a handle for the version of its format, and
# refuses one that is higher than its own.
_DESCRIPTOR = b"DIPC"
_GRANT = b"DIPG"

# The names of the kinds of devices, and the suffix of the methods for each.
_SUFFIXES = {"cuda": "cuda", "npu": "npu"}

# Seconds between two looks for storages that are no longer used, the first and the longest.
_FIRST_LOOK = 0.01
_LONGEST_LOOK = 1.0
# Storages of one look.
_LOOKS = 1000

_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _cdata: 0)


class _Shared:
    """A storage that this process has shared."""

    __slots__ = ("device", "export", "handle", "is_watched", "nbytes", "ptr", "storage")

    def __init__(self, storage: Any, export: Any, device: tuple[str, int]) -> None:
        self.storage = storage
        self.export = export
        self.handle = b"" if export is None else bytes(export.descriptor)
        self.device = device
        self.ptr = 0 if export is None else storage.data_ptr()
        self.nbytes = 0 if export is None else storage.nbytes()
        self.is_watched = False

    def references(self) -> int:
        """Returns the number of references to the storage's object."""
        return sys.getrefcount(self.storage)

    def is_current(self) -> bool:
        """Returns whether the storage still is the memory that was shared: ``resize_`` replaces it."""
        return bool(self.storage.data_ptr() == self.ptr and self.storage.nbytes() == self.nbytes)


def _own_references() -> int:
    """Returns the number of references to the object of a storage that only this module has, and the owner of its export."""
    shared = _Shared(object(), None, ("", 0))
    owner = [shared.storage]
    return shared.references() * len(owner)


class _Received:
    """A storage in memory of another process."""

    __slots__ = ("handle", "mapping", "reference")

    def __init__(self, storage: Any, handle: bytes, mapping: _native.Mapping) -> None:
        # Keeps the number of the storage from being used again, and not the storage.
        self.reference: Any = _torch.multiprocessing.reductions.StorageWeakRef(storage)
        self.handle = handle
        # Not the mapping, which would keep the memory open.
        self.mapping = _native.WeakMapping(mapping)


class _Storages:
    """The storages that this process has shared or received. Those that it has shared are kept until nobody uses them."""

    def __init__(self) -> None:
        self.payload_lifetime = 600.0
        # Reentrant: a finalizer may run at any point.
        self._lock = threading.RLock()
        self._shared: dict[int, _Shared] = {}
        self._by_handle: dict[bytes, _Shared] = {}
        self._received: dict[int, _Received] = {}
        self._received_limit = 128
        # The storages to look at next, a few at each share.
        self._next: list[int] = []
        self._wake = threading.Event()
        self._has_thread = False

    def share(self, storage: Any, kind: str) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
        """Returns the part of a payload that names the storage."""
        index = storage.device.index or 0
        with _device(kind, index), self._lock:
            received = self._find_received(storage)
            if received is not None:
                handle, granted = received.handle, received.mapping.grant(self.payload_lifetime)
            else:
                shared = self._find_shared(storage)
                if shared is None:
                    shared = self._add(storage, kind, index)
                else:
                    # A receiver that has the storage waits for nothing, so what was written since has to be complete.
                    _synchronize(kind, index)
                handle, granted = shared.handle, shared.export.grant(self.payload_lifetime)
            grant = b"" if granted is None else bytes(granted)
            self._look_at_some(2)
        return index, handle, storage.nbytes(), 0, grant, 0, b"", False

    def _find_shared(self, storage: Any) -> _Shared | None:
        shared = self._shared.get(storage._cdata)
        if shared is not None and not shared.is_current():
            self._remove(storage._cdata)
            return None
        return shared

    def _add(self, storage: Any, kind: str, index: int) -> _Shared:
        export = _native.share_storage(storage, f"{kind}:{index}", storage.data_ptr(), storage.nbytes())
        shared = _Shared(storage, export, (kind, index))
        self._shared[storage._cdata] = shared
        self._by_handle[shared.handle] = shared
        self._start_thread()
        return shared

    def _find_received(self, storage: Any) -> _Received | None:
        received = self._received.get(storage._cdata)
        return None if received is None or received.reference.expired() else received

    def open(self, kind: str, device: int, handle: bytes, nbytes: int, grant: bytes) -> Any:
        """Returns a storage in the memory that a payload names."""
        with self._lock:
            shared = self._by_handle.get(handle)
            if shared is not None and (shared.device[1] == device or shared.device[0] == "cpu"):
                # A payload of this process.
                _give_back(grant)
                return shared.storage
        with _device(kind, device):
            try:
                mapping = _native.open(handle, device=device, grant=grant if grant.startswith(_GRANT) else None)
            except Error as error:
                _give_back(grant)
                if error.is_gone or error.is_stale:
                    raise StaleError(
                        f"the payload is stale: its memory is gone ({error}); send the tensor again"
                    ) from error
                raise
            region = mapping.regions[0]
            if region.nbytes < nbytes:
                raise StaleError(f"the payload names {nbytes} B of memory of {region.nbytes} B")
            storage = _storage_of(region)
        with self._lock:
            self._received[storage._cdata] = _Received(storage, handle, mapping)
            if len(self._received) > self._received_limit:
                live = {key: one for key, one in self._received.items() if not one.reference.expired()}
                self._received, self._received_limit = live, max(128, 2 * len(live))
        return storage

    def collect(self) -> None:
        """Ends the exports of all storages that are no longer used."""
        with self._lock:
            for cdata in list(self._shared):
                self._look(cdata)

    def _look_at_some(self, count: int) -> None:
        for _ in range(min(count, len(self._shared))):
            if not self._next:
                self._next = list(self._shared)
            self._look(self._next.pop())

    def _look(self, cdata: int) -> None:
        """Ends the export of a storage that neither this process nor another one uses."""
        shared = self._shared.get(cdata)
        if shared is None or _use_count(cdata) > 1 or shared.references() > _OWN_REFERENCES:
            return
        if not shared.is_watched:
            shared.is_watched = True
            shared.export.on_change(self._wake.set)
        if _native.end_unless_used(shared.export):
            self._remove(cdata)

    def _remove(self, cdata: int) -> None:
        shared = self._shared.pop(cdata)
        self._by_handle.pop(shared.handle, None)

    def _start_thread(self) -> None:
        self._wake.set()
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._run, name="device-ipc-torch", daemon=True).start()

    def _run(self) -> None:
        """Looks at all storages, soon after a share or a change and rarely otherwise: the last ``del`` of a tensor calls nobody."""
        pause = _LONGEST_LOOK
        while True:
            if self._wake.wait(pause):
                self._wake.clear()
                pause = _FIRST_LOOK
            else:
                pause = min(2 * pause, _LONGEST_LOOK)
            with self._lock:
                self._look_at_some(_LOOKS)
                if not self._shared and not self._wake.is_set():
                    self._has_thread = False
                    return
            # Many shares at a time do not keep the thread busy.
            time.sleep(_FIRST_LOOK)

    def forget(self) -> None:
        """In a forked child: the storages belong to the parent, and are neither used nor freed here."""
        _abandoned.append((self._shared, self._by_handle, self._received))
        lifetime = self.payload_lifetime
        self.__init__()  # type: ignore[misc]
        self.payload_lifetime = lifetime


_abandoned: list[Any] = []
_OWN_REFERENCES = _own_references()
_storages = _Storages()
_originals: dict[str, Any] = {}
_collectors: list[tuple[Any, Any]] = []
_install_lock = threading.Lock()


def _give_back(grant: bytes) -> None:
    if grant.startswith(_GRANT):
        _native.Grant(grant).give_back()


def _device(kind: str, index: int) -> Any:
    """Returns a context with this device as the current one: queues pickle on a thread that has none."""
    return contextlib.nullcontext() if kind == "cpu" else getattr(torch, kind).device(index)


def _synchronize(kind: str, index: int) -> None:
    if kind != "cpu":
        stream = getattr(torch, kind).current_stream(index)
        if not stream.query():
            stream.synchronize()


def _storage_of(region: _native.Tensor) -> Any:
    """Returns a storage in a region that is open. The stream waits for the bytes already."""
    if region.device.startswith("npu"):
        # torch_npu calls __dlpack__ without arguments.
        return _torch.from_dlpack(region).untyped_storage()
    return torch.utils.dlpack.from_dlpack(region.__dlpack__(stream=-1)).untyped_storage()


def _methods(kind: str) -> Iterator[tuple[str, Any]]:
    """Returns the replacements of the methods for one kind of device."""
    suffix = _SUFFIXES[kind]
    share_name, open_name, release_name = f"_share_{suffix}_", f"_new_shared_{suffix}", f"_release_ipc_counter_{suffix}"
    stock_share = getattr(torch.UntypedStorage, share_name)
    stock_open = getattr(torch.UntypedStorage, open_name)
    stock_release = getattr(torch.UntypedStorage, release_name)

    def share(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.nbytes() == 0:
            return stock_share(self, *args, **kwargs)
        return _storages.share(self, self.device.type)

    def open(device: Any, handle: Any, size: Any, offset: Any, counter: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(handle, bytes) and handle.startswith(_DESCRIPTOR):
            return _storages.open(_kind_of(handle, kind), device, handle, size, counter)
        return stock_open(device, handle, size, offset, counter, *args, **kwargs)

    def release(counter: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(counter, bytes) and counter.startswith(_GRANT):
            return _native.Grant(counter).give_back()
        return stock_release(counter, *args, **kwargs)

    yield share_name, share
    yield open_name, staticmethod(open)
    yield release_name, staticmethod(release)


def _kind_of(handle: bytes, kind: str) -> str:
    return "cpu" if _native.Descriptor(handle).backend == "mock" else kind


def install(payload_lifetime: float) -> None:
    """Replaces the methods; see ``device_ipc.torch.install``."""
    with _install_lock:
        _storages.payload_lifetime = payload_lifetime
        if not hasattr(torch._C, "_storage_Use_Count"):
            raise UnsupportedError(
                f"torch {torch.__version__} does not tell who uses a storage (torch._C._storage_Use_Count); use 2.8 or later"
            )
        for kind, suffix in _SUFFIXES.items():
            if f"_share_{suffix}_" in _originals or not hasattr(torch.UntypedStorage, f"_share_{suffix}_"):
                continue
            for name, method in list(_methods(kind)):
                _originals[name] = torch.UntypedStorage.__dict__.get(name)
                setattr(torch.UntypedStorage, name, method)
            module = getattr(torch, kind, None)
            if module is not None and hasattr(module, "ipc_collect"):
                _hook_collector(module)


def _hook_collector(module: Any) -> None:
    stock = module.ipc_collect

    def ipc_collect() -> None:
        _storages.collect()
        stock()

    ipc_collect.__doc__ = stock.__doc__
    module.ipc_collect = ipc_collect
    _collectors.append((module, stock))


def uninstall() -> None:
    """Restores the methods; see ``device_ipc.torch.uninstall``."""
    with _install_lock:
        for name, original in _originals.items():
            if original is None:
                delattr(torch.UntypedStorage, name)
            else:
                setattr(torch.UntypedStorage, name, original)
        _originals.clear()
        for module, stock in _collectors:
            module.ipc_collect = stock
        _collectors.clear()


os.register_at_fork(after_in_child=_storages.forget)

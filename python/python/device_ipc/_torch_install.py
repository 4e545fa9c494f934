"""Passes the storages of ``torch.multiprocessing`` through this library; see ``device_ipc.torch.install``.

PyTorch sends a CUDA tensor as a call of ``rebuild_cuda_tensor`` with fifteen arguments. Three methods of
``torch.UntypedStorage`` make and use the eight of them that name memory. They are replaced here, and nothing else, so
that the payloads have PyTorch's form, and code that rewrites or checks them works:

=============== ====================================================================================================
storage_handle  the descriptor of the storage, or of the allocator's block that it lies in, with its place there and its ticket: equal in
                all payloads of it, as receivers find their storages by it
storage_offset  0
ref_counter     the right of this payload to open the memory, which keeps it until then
event           empty: the memory is ready for the receiver's stream when it is open
=============== ====================================================================================================
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from . import _backends, _native
from ._errors import UnsupportedError

# Without the types, which PyTorch does not have for all that is used here.
_torch: Any = torch

# The first bytes of handles, and of the rights to open them. PyTorch takes the first byte of a handle for the version of its format, and
# refuses one that is higher than its own.
_HANDLES = (b"DIPB", b"DIPC")
_RIGHTS = (b"DIPF", b"DIPG", b"DIPT")

# Seconds between two looks for storages that are no longer used, the first and the longest.
_FIRST_LOOK = 0.01
_LONGEST_LOOK = 1.0
# Storages of one look.
_LOOKS = 1000
# Times as long as a look takes that no other one begins after it.
_REST = 30


class _Looks:
    """The thread that looks at the storages that this process has shared: the last ``del`` of a tensor calls nobody."""

    def __init__(self) -> None:
        # Reentrant: a finalizer may run at any point.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._has_thread = False

    def wake(self) -> None:
        """Looks soon, at all storages; they are looked at rarely otherwise."""
        self._wake.set()
        with self._lock:
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="device-ipc-torch", daemon=True).start()

    def _run(self) -> None:
        pause = _LONGEST_LOOK
        while True:
            if self._wake.wait(pause):
                self._wake.clear()
                pause = _FIRST_LOOK
            else:
                pause = min(2 * pause, _LONGEST_LOOK)
            begun = time.monotonic()
            _storages.look(_LOOKS)
            took = time.monotonic() - begun
            with self._lock:
                if not len(_storages) and not self._wake.is_set():
                    self._has_thread = False
                    return
            # A look holds the interpreter lock, which a sender of many tensors waits for.
            time.sleep(max(_FIRST_LOOK, took * _REST))


def _new_storages() -> _native.Storages:
    return _native.Storages(_Looks().wake)


_abandoned: list[Any] = []
_storages = _new_storages()
_originals: dict[str, Any] = {}
_collectors: list[tuple[Any, Any]] = []
_install_lock = threading.Lock()


def _storage_of(region: _native.Tensor) -> Any:
    """Returns a storage in a region that is open. The stream waits for the bytes already."""
    if region.__dlpack_device__()[0] == _backends.EXTENSION:
        # An extension such as torch_npu calls __dlpack__ without arguments, and allocates on the current device.
        kind, _, ordinal = region.device.partition(":")
        with getattr(torch, kind).device(int(ordinal)):
            return _torch.from_dlpack(region).untyped_storage()
    return torch.utils.dlpack.from_dlpack(region.__dlpack__(stream=-1)).untyped_storage()


def _methods(kind: str) -> Iterator[tuple[str, Any]]:
    """Returns the replacements of the methods for one kind of device."""
    share_name, open_name, release_name = f"_share_{kind}_", f"_new_shared_{kind}", f"_release_ipc_counter_{kind}"
    stock_share = getattr(torch.UntypedStorage, share_name)
    stock_open = getattr(torch.UntypedStorage, open_name)
    stock_release = getattr(torch.UntypedStorage, release_name)

    def share(self: Any, *args: Any, **kwargs: Any) -> Any:
        nbytes = self.nbytes()
        return _storages.share(self, nbytes) if nbytes else stock_share(self, *args, **kwargs)

    def open(device: Any, handle: Any, size: Any, offset: Any, counter: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(handle, bytes) and handle.startswith(_HANDLES):
            return _storages.open(device, handle, size, counter, _storage_of)
        return stock_open(device, handle, size, offset, counter, *args, **kwargs)

    def release(counter: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(counter, bytes) and counter.startswith(_RIGHTS):
            return _storages.release(counter)
        return stock_release(counter, *args, **kwargs)

    yield share_name, share
    yield open_name, staticmethod(open)
    yield release_name, staticmethod(release)


def install(payload_lifetime: float) -> None:
    """Replaces the methods; see ``device_ipc.torch.install``."""
    with _install_lock:
        _storages.payload_lifetime = payload_lifetime
        if not hasattr(torch._C, "_storage_Use_Count"):
            raise UnsupportedError(
                f"torch {torch.__version__} does not tell who uses a storage (torch._C._storage_Use_Count); use 2.8 or later"
            )
        for kind in _backends.kinds():
            if f"_share_{kind}_" in _originals or not hasattr(torch.UntypedStorage, f"_share_{kind}_"):
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


def _forget() -> None:
    """In a forked child: the storages belong to the parent, and are neither used nor freed here."""
    global _storages
    _abandoned.append(_storages)
    lifetime, _storages = _storages.payload_lifetime, _new_storages()
    _storages.payload_lifetime = lifetime


os.register_at_fork(after_in_child=_forget)

"""PyTorch tensors of all element types, strides and offsets. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import _native
from ._blocks import BlockCopy
from ._torch_pool import pool, pool_blocks
from ._views import Views, open_writable

# Without `open`: an import of all names shadows no built-in one.
__all__ = ["BlockCopy", "Tensors", "empty", "install", "pool", "pool_blocks", "uninstall"]


class Tensors(Views):
    """A mapping of names to torch tensors in the memory of another process; see ``open``.

    As a context manager, it releases the memory at the end of the block, in the order of its stream. A tensor that is still in
    use after the block keeps the memory mapped.
    """

    def _import(self, mapping: _native.Mapping) -> dict[str, Any]:
        views = mapping._torch_views(_other)
        self._is_counted = views is not None
        return self._of_regions(mapping) if views is None else views

    def _of_regions(self, mapping: _native.Mapping) -> dict[str, Any]:
        """Returns views of all tensors where PyTorch has no function for it: before 2.10, and for NPUs."""
        torch = _torch()
        regions = [torch.from_dlpack(region) for region in mapping.regions]
        kinds, places = mapping._places()
        # A function that makes empty tensors, and the storage that they become views of.
        makers: list[tuple[Any, Any]] = []
        for dtype, position in kinds:
            if position is None:
                makers.append((None, None))
            else:
                empty = torch.empty(0, dtype=_dtype(torch, dtype), device=regions[position].device)
                makers.append((empty.new_empty, regions[position].untyped_storage()))
        views = {}
        for name, kind, offset, shape, strides in places:
            new_empty, storage = makers[kind]
            if new_empty is None:
                views[name] = _single(torch, mapping[name])
            elif strides is None:
                views[name] = new_empty(0).set_(storage, offset, shape)
            else:
                views[name] = new_empty(0).set_(storage, offset, shape, strides)
        return views


def _torch() -> Any:
    """Returns the module, whose type stubs do not export all of its functions."""
    import torch

    return torch


def _dtype(torch: Any, name: str) -> Any:
    """Returns the element type of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no element type {name}")
    return dtype


def _other(tensor: _native.Tensor, view: Any) -> Any:
    """Returns a torch tensor that DLPack cannot describe, or one with the storage of a view at the same place."""
    torch = _torch()
    if view is None:
        return _single(torch, tensor)
    empty = torch.empty(0, dtype=_dtype(torch, tensor.dtype), device=view.device)
    return empty.set_(view.untyped_storage(), 0, tensor.shape, tensor.strides)


def _single(torch: Any, tensor: _native.Tensor) -> Any:
    """Returns a torch tensor with a storage of its own."""
    region = torch.from_dlpack(tensor.bytes)
    empty = torch.empty(0, dtype=_dtype(torch, tensor.dtype), device=region.device)
    return empty.set_(region.untyped_storage(), 0, tensor.shape, tensor.strides)


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
) -> Tensors:
    """Opens memory of another process as torch tensors.

    torch has no read-only tensors. A read-only mapping is refused unless ``allow_read_only`` is true; then a kernel that writes
    a tensor ends this process's use of the device, and a write by the host on the mock ends the process.

    The parameters are those of ``device_ipc.open``: ``descriptor`` (text, bytes, ``Descriptor`` or ``"keeper:NAME"``), ``device`` (a
    device here or a dict of devices; by default the home device), ``access`` (``"r"`` or ``"rw"``), ``stream`` (the one that waits for the bytes),
    ``copy`` (the condition of a copy, and the way; by default ``"never"``), ``timeout`` (in seconds; ``None`` is no
    limit), ``allow_users`` (further user ids of exporters), ``grant``, ``progress`` (called with the numbers of copied and of all bytes), and
    ``reserved`` (addresses that stay, ``True`` or a pair of a ``Reservation`` and an offset, for ``mapping.suspend``, ``resume``, ``replace`` and ``follow``).
    Raises as ``device_ipc.open``, ``NotPermittedError`` for read-only memory, and ``TypeError`` for an element type that torch does not have.
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
    return Tensors(open_writable("torch", descriptor, allow_read_only, **options))


def empty(shape: Any, dtype: Any, device: Any = None) -> Any:
    """Allocates an uninitialised torch tensor in memory that can be shared.

    ``shape``, ``dtype`` and ``device`` are those of ``device_ipc.empty``. Raises as it does, and ``TypeError`` for an element type that
    torch does not have.
    """
    return _single(_torch(), _native.empty(list(shape), dtype, device))


def install(*, payload_lifetime: float = 600.0) -> None:
    """Passes tensors that ``torch.multiprocessing`` sends through this library, in this process.

    Call it in the sending and in the receiving processes. Queues, pipes, ``reduce_tensor`` and ``rebuild_cuda_tensor`` then work
    with every kind of memory, expandable segments and memory pools included, and without the right to trace other processes.
    A payload can be opened several times, and received tensors can be sent on. A payload that no process opens keeps its memory for
    ``payload_lifetime`` seconds, and a payload whose memory is gone raises ``StaleError``.

    Payloads of processes that have not called it are opened as before; such processes refuse payloads of this one. A storage
    that others may still use must not be resized. For NPUs, call it after ``import torch_npu``. Calling it again only sets
    ``payload_lifetime``.
    """
    from . import _torch_install

    _torch_install.install(payload_lifetime)


def uninstall() -> None:
    """Restores PyTorch's methods. Memory that was shared before stays until no process uses it."""
    from . import _torch_install

    _torch_install.uninstall()

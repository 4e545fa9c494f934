"""PyTorch tensors of all element types, strides and offsets. Importing this module does not import torch."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import NotPermittedError

if TYPE_CHECKING:
    from typing_extensions import Self


class Tensors(collections.abc.Mapping[str, Any]):
    """A mapping of names to torch tensors in the memory of another process; see ``open``.

    As a context manager, it releases the memory at the end of the block, in the order of its stream. A tensor that is still in
    use after the block keeps the memory mapped.
    """

    def __init__(self, mapping: _native.Mapping) -> None:
        import torch

        self._mapping = mapping
        self._tensors: dict[str, Any] = {}
        # One import for each region; a tensor is a view of the region's storage.
        regions = [(region.ptr, region.nbytes, torch.from_dlpack(region)) for region in mapping.regions]
        for name, tensor in mapping.items():
            self._tensors[name] = _view(torch, tensor, regions)

    @property
    def mapping(self) -> _native.Mapping:
        """The mapping that the tensors lie in."""
        return self._mapping

    @property
    def tensor(self) -> Any:
        """The tensor without a name."""
        return self._tensors[""]

    def close(self, stream: object | None = None) -> None:
        """Releases the memory, as ``Mapping.close`` does."""
        self._tensors.clear()
        self._mapping.close(stream)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<device_ipc.torch.Tensors in {self._mapping!r}>"


def _view(torch: Any, tensor: _native.Tensor, regions: list[tuple[int, int, Any]]) -> Any:
    """Returns a torch tensor of one tensor of a mapping."""
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no element type {tensor.dtype}")
    for start, nbytes, region in regions:
        offset = tensor.ptr - start
        if tensor.nbytes > 0 and offset >= 0 and offset + tensor.nbytes <= nbytes:
            if offset % dtype.itemsize == 0:
                storage = region.untyped_storage()
                return _set(torch, dtype, storage, offset // dtype.itemsize, tensor, region.device)
            break
    # Without elements, or not aligned in its region: a storage of its own.
    single = torch.from_dlpack(tensor.bytes)
    return _set(torch, dtype, single.untyped_storage(), 0, tensor, single.device)


def _set(torch: Any, dtype: Any, storage: Any, offset: int, tensor: _native.Tensor, device: Any) -> Any:
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage, offset, tensor.shape, tensor.strides)


def open(
    descriptor: _native.Descriptor | str | bytes,
    *,
    device: Any = None,
    access: Any = None,
    stream: object | None = None,
    staged: bool | None = False,
    timeout: float | None = 30.0,
    allow_read_only: bool = False,
) -> Tensors:
    """Opens memory of another process as torch tensors.

    torch has no read-only tensors. A read-only mapping is refused unless ``allow_read_only`` is true; then a kernel that writes
    a tensor ends this process's use of the device, and a write by the host on the mock ends the process.
    """
    mapping = _native.open(
        descriptor,
        device=device,
        access=access,
        stream=stream,
        staged=staged,
        timeout=timeout,
        allow_read_only=allow_read_only,
    )
    if mapping.read_only and not allow_read_only:
        mapping.close()
        raise NotPermittedError(
            "the memory is shared read-only, and torch has no read-only tensors: a write would end this process's use of the "
            "device; if no work writes the tensors, pass allow_read_only=True"
        )
    return Tensors(mapping)


def empty(shape: Any, dtype: Any, device: Any = None) -> Any:
    """Allocates an uninitialised torch tensor in memory that can be shared."""
    import torch

    tensor = _native.empty(list(shape), dtype, device)
    region = torch.from_dlpack(tensor.bytes)
    return _set(torch, dtype, region.untyped_storage(), 0, tensor, region.device)

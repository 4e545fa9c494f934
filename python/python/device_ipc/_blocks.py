"""Copies of blocks between tensors: many blocks of many tensors in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROGRAM_WORDS = 2048
"""Words of 8 bytes that one program of the kernel copies."""


class BlockCopy:
    """Copies blocks of source tensors to blocks of destination tensors, such as KV caches of two engines.

    ``destinations`` and ``sources`` are as many torch tensors. The first axis of each one is that of the blocks; the numbers of blocks may
    differ. Raises ``ValueError`` with the first difference where the blocks of a destination and its source differ in element type, shape
    or strides, and where a block is not one piece of memory. The tensors must stay alive as long as this object is used.

    On CUDA one Triton kernel copies everything, without a step of Python for a block or a tensor; without Triton, and on other devices,
    two operations for each tensor do. A source may lie on another device that the destination's device can reach.
    """

    def __init__(self, destinations: Sequence[Any], sources: Sequence[Any]) -> None:
        if len(destinations) != len(sources):
            raise ValueError(f"{len(destinations)} destinations and {len(sources)} sources; pass as many of each")
        if not destinations:
            raise ValueError("there is nothing to copy; pass tensors")
        words = set()
        for position, (to, of) in enumerate(zip(destinations, sources, strict=True)):
            for what, there, here in [
                ("element type", of.dtype, to.dtype),
                ("shape of a block", tuple(of.shape[1:]), tuple(to.shape[1:])),
                ("strides in bytes", of.stride(), to.stride()),
            ]:
                if there != here:
                    raise ValueError(f"tensor {position}: the {what} is {there} in the source and {here} in the destination")
            words.add(_words(to, position))
        self._device = destinations[0].device
        self._views = [
            (_of_words(to), _of_words(of)) for to, of in zip(destinations, sources, strict=True)
        ]
        self._limits = (min(len(tensor) for tensor in sources), min(len(tensor) for tensor in destinations))
        # Blocks of one size are one kernel; others are copied tensor by tensor.
        self._words = words.pop() if len(words) == 1 else None
        self._kernel = _kernel() if self._device.type == "cuda" and self._words is not None else None
        self._table: Any = None

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies block ``sources[i]`` to block ``destinations[i]`` in all tensors, on the current stream of the destinations' device.

        The host waits for nothing. Raises ``IndexError``, and copies nothing, where a tensor has no such block.
        """
        import torch

        if len(sources) != len(destinations):
            raise ValueError(f"{len(sources)} source blocks and {len(destinations)} destination blocks; pass as many of each")
        if not sources:
            return
        indices = torch.tensor([sources, destinations], dtype=torch.int64)
        for what, row, limit in zip(("source", "destination"), indices, self._limits, strict=True):
            if int(row.min()) < 0 or int(row.max()) >= limit:
                raise IndexError(f"{what} block {int(row.max())} (the smallest is {int(row.min())}) of {limit}; copied nothing")
        if self._device.type != "cpu":
            indices = indices.pin_memory().to(self._device, non_blocking=True)
        if self._kernel is None:
            for to, of in self._views:
                to.index_copy_(0, indices[1], of.index_select(0, indices[0].to(of.device)).to(to.device))
            return
        if self._table is None:
            # Tensors of another device have addresses that this device can use.
            table = [[of.data_ptr(), of.stride(0), to.data_ptr(), to.stride(0)] for to, of in self._views]
            self._table = torch.tensor(table, dtype=torch.int64).to(self._device)
        assert self._words is not None
        grid = (-(-self._words // _PROGRAM_WORDS), len(sources), len(self._views))
        with torch.cuda.device(self._device):
            self._kernel[grid](self._table, indices, len(sources), self._words, WORDS=_PROGRAM_WORDS)


def _words(tensor: Any, position: int) -> int:
    """Returns the number of words of 8 bytes in a block."""
    block = tensor[:1]
    nbytes = block.numel() * tensor.element_size()
    strides = sorted((stride, size) for size, stride in zip(block.shape[1:], block.stride()[1:], strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            raise ValueError(f"tensor {position}: a block is not one piece of memory (strides {tuple(tensor.stride())})")
        expected *= size
    if nbytes == 0 or nbytes % 8 or tensor.data_ptr() % 8 or (tensor.stride(0) * tensor.element_size()) % 8:
        raise ValueError(f"tensor {position}: blocks of {nbytes} B; their size and their addresses must be multiples of 8 B")
    return int(nbytes) // 8


def _of_words(tensor: Any) -> Any:
    """Returns a view with the blocks as rows of words."""
    import torch

    size = tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    row = tensor[:1].numel()
    flat = flat.set_(tensor.untyped_storage(), tensor.storage_offset(), (len(tensor), row), (tensor.stride(0), 1))
    if size == 8:
        return flat.view(torch.int64)
    return flat.view(torch.int64) if row * size % 8 == 0 else flat


def _kernel() -> Any:
    """Returns the kernel, or None without Triton."""
    try:
        from ._blocks_triton import copy
    except ImportError:
        return None
    return copy

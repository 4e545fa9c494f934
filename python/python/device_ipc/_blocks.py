"""Copies of blocks between tensors: many blocks of many tensors in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _native


class BlockCopy:
    """Copies blocks of source tensors to blocks of destination tensors, such as KV caches of two engines.

    ``destinations`` and ``sources`` are as many torch tensors. The first axis of each one is that of the blocks; the numbers of blocks may
    differ. Raises ``ValueError`` with the first difference where the blocks of a destination and its source differ in element type, shape
    or strides, where a block is not one piece of memory, and for destinations on several devices. The tensors must stay alive as long as
    this object is used.

    On an accelerator the backend copies everything, on CUDA with one kernel for 64 tensors and 250 blocks, which is loaded here; on the host two
    operations for each tensor do. A source may lie on another device that the destination's device can reach.
    """

    def __init__(self, destinations: Sequence[Any], sources: Sequence[Any]) -> None:
        if len(destinations) != len(sources):
            raise ValueError(f"{len(destinations)} destinations and {len(sources)} sources; pass as many of each")
        if not destinations:
            raise ValueError("there is nothing to copy; pass tensors")
        self._device = destinations[0].device
        sizes = []
        for position, (to, of) in enumerate(zip(destinations, sources, strict=True)):
            for what, there, here in [
                ("element type", of.dtype, to.dtype),
                ("shape of a block", tuple(of.shape[1:]), tuple(to.shape[1:])),
                ("strides", of.stride(), to.stride()),
            ]:
                if there != here:
                    raise ValueError(f"tensor {position}: the {what} is {there} in the source and {here} in the destination")
            if to.device != self._device:
                raise ValueError(f"tensor {position}: the destination is on {to.device}, and the first one on {self._device}")
            sizes.append(_block_bytes(to, position))
        self._limits = (min(len(tensor) for tensor in sources), min(len(tensor) for tensor in destinations))
        self._on_host: list[tuple[Any, Any]] = []
        self._on_device: list[_native._BlockCopy] = []
        pairs = list(zip(destinations, sources, sizes, strict=True))
        if self._device.type == "cpu":
            self._on_host = [(_rows(to, size), _rows(of, size)) for to, of, size in pairs]
            return
        for one in sorted(set(sizes)):
            places = [(_place(to, size), _place(of, size)) for to, of, size in pairs if size == one]
            self._on_device.append(_native._BlockCopy(self._device, places, one))

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies block ``sources[i]`` to block ``destinations[i]`` in all tensors, on the current stream of the destinations' device.

        The host waits for nothing. Name no destination twice. Raises ``IndexError``, and copies nothing, where a tensor has no such block.
        """
        if len(sources) != len(destinations):
            raise ValueError(f"{len(sources)} source blocks and {len(destinations)} destination blocks; pass as many of each")
        if not sources:
            return
        for what, numbers, limit in zip(("source", "destination"), (sources, destinations), self._limits, strict=True):
            if min(numbers) < 0 or max(numbers) >= limit:
                raise IndexError(f"{what} block {max(numbers)} (the smallest is {min(numbers)}) of {limit}; copied nothing")
        for copy in self._on_device:
            copy.copy(sources, destinations)
        if self._on_host:
            import torch

            of_blocks, to_blocks = torch.tensor([list(sources), list(destinations)], dtype=torch.int64)
            for to, of in self._on_host:
                to.index_copy_(0, to_blocks, of.index_select(0, of_blocks))


def _block_bytes(tensor: Any, position: int) -> int:
    """Returns the bytes of a block."""
    block = tensor[:1]
    strides = sorted((stride, size) for size, stride in zip(block.shape[1:], block.stride()[1:], strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            raise ValueError(f"tensor {position}: a block is not one piece of memory (strides {tuple(tensor.stride())})")
        expected *= size
    nbytes = int(block.numel() * tensor.element_size())
    if nbytes == 0:
        raise ValueError(f"tensor {position}: its blocks have no bytes")
    return nbytes


def _place(tensor: Any, block_bytes: int) -> tuple[int, int, int]:
    """Returns the address, the bytes up to the end of the last block, and the bytes from block to block."""
    stride = tensor.stride(0) * tensor.element_size()
    return tensor.data_ptr(), (len(tensor) - 1) * stride + block_bytes, stride


def _rows(tensor: Any, block_bytes: int) -> Any:
    """Returns a view with the bytes of each block as a row, as PyTorch cannot index all element types."""
    import torch

    size = tensor.element_size()
    first, stride = tensor.storage_offset() * size, tensor.stride(0) * size
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), first, (len(tensor), block_bytes), (stride, 1))

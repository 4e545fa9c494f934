"""Memory for PyTorch that other processes open by one call for each block, instead of one for each allocation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import _native
from ._errors import UnsupportedError

BLOCK_BYTES = 512 << 20


@contextlib.contextmanager
def pool(device: Any = None, *, block_bytes: int = BLOCK_BYTES) -> Iterator[None]:
    """Allocates the CUDA tensors that this thread creates in the ``with`` block in memory that is cheap to share.

    The tensors lie in blocks of ``block_bytes``, or of what one tensor needs where that is more. An importer opens each block by
    one file descriptor, in 0.2 ms to 0.4 ms whatever its length: read-only where it was shared with ``access="r"``, and in other
    containers too. Choose the length of all tensors (``block_bytes=16 << 30`` for 16 GiB of weights) to have one block.

    ``device`` is a device of torch, or the current one. Tensors outlive the ``with`` block. When they have died,
    ``torch.cuda.empty_cache()`` gives their memory back to the driver, of each block with its last tensor. Until then torch uses
    the memory for the same ``with`` block only, and a block with one small tensor stays allocated as a whole; so create short-lived
    tensors outside. All pools of the process share blocks, and an importer of one tensor can reach the whole block.

    Without memory for a block of ``block_bytes``, a smaller one is allocated; without memory for that either, torch raises its
    ``OutOfMemoryError``.
    """
    import torch

    if not hasattr(torch.cuda, "MemPool"):
        raise UnsupportedError(f"torch {torch.__version__} has no torch.cuda.MemPool; install torch 2.8 or later")
    selected = torch.device("cuda" if device is None else device)
    if selected.type != "cuda":
        raise UnsupportedError(f"torch has memory pools for CUDA only, not for {selected.type}")
    ordinal = torch.cuda.current_device() if selected.index is None else selected.index
    _native._pool_prepare(ordinal, block_bytes)
    with torch.cuda.device(ordinal):
        # At the end of this function no reference is left, so that torch lets empty_cache free the memory.
        memory = torch.cuda.MemPool(_allocator().allocator())
    with torch.cuda.use_mem_pool(memory, device=ordinal):
        yield


@functools.cache
def _allocator() -> Any:
    """Returns the allocator, which torch uses as long as there are tensors: it lives as long as the process."""
    import torch

    return torch.cuda.memory.CUDAPluggableAllocator(
        _native.__file__, "device_ipc_torch_alloc", "device_ipc_torch_free"
    )


class PoolBlock(NamedTuple):
    """A block of the memory of ``pool``."""

    device: str
    ptr: int
    nbytes: int
    """The length in bytes."""
    used: int
    """The bytes that torch has, for tensors or in reserve (until ``torch.cuda.empty_cache()``)."""


def pool_blocks() -> list[PoolBlock]:
    """Returns the blocks of ``pool`` that are allocated: what an importer of all tensors in them opens."""
    return [PoolBlock(*block) for block in _native._pool_blocks()]

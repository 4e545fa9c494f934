"""The kernel of ``device_ipc._blocks``. Imports Triton."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def copy(table, indices, count, words, WORDS: tl.constexpr):
    """Copies WORDS words of 8 bytes of one block of one tensor.

    Each row of ``table`` has the address of a source, the words from block to block, and the same of its destination. ``indices`` are
    ``count`` source blocks and as many destination blocks.
    """
    block = tl.program_id(1)
    row = table + 4 * tl.program_id(2)
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    of = tl.load(row).to(tl.pointer_type(tl.int64)) + tl.load(row + 1) * tl.load(indices + block)
    to = tl.load(row + 2).to(tl.pointer_type(tl.int64)) + tl.load(row + 3) * tl.load(indices + count + block)
    tl.store(to + at, tl.load(of + at, mask=at < words), mask=at < words)

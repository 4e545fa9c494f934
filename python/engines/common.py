"""What the cases of all engines need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import models
from .suite import Skipped

SLACK = 64 << 20
"""Device memory of kernels and libraries, which comes with the first use of each."""


def check(found: Any, expected: Any, what: str) -> None:
    """Fails with the first difference of two results."""
    if found == expected:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        first = f"{names[0]!r}: {found.get(names[0])} != {expected.get(names[0])}"
        raise AssertionError(f"{what}: {len(names)} of {len(expected)} differ, the first is {first}")
    raise AssertionError(f"{what}: {found} != {expected}")


def devices(count: int) -> None:
    import torch

    if torch.cuda.device_count() < count:
        raise Skipped(f"it needs {count} devices, and this machine has {torch.cuda.device_count()}")


def filled(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    state = models.checkpoint(config, "cuda")
    models.fill(state, seed)
    return state


def gigabytes() -> float:
    """Returns the device memory in use, by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 1e9


@contextlib.contextmanager
def pooled(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A checkpoint in memory that one open shares."""
    import device_ipc.torch

    with device_ipc.torch.pool():
        state = models.checkpoint(config, "cuda")
    models.fill(state, 0)
    yield state

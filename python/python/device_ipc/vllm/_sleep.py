"""Sleep of an engine whose weights are in place: the keeper keeps the bytes, and the engine keeps their addresses.

At both levels the mapping of the weights is returned and nothing of them is copied. The engine wakes with the keeper's present version, which may be
newer, under the same tensors and captured graphs. What is the engine's own, such as tables of positions, is small, and goes to the host at both levels.
"""

from __future__ import annotations

import time

from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.logger import init_logger

from .._in_place import MODELS

_logger = init_logger(f"vllm.{__name__}")


class SleepBackend(CuMemBackend):  # type: ignore[misc]
    """vLLM's own backend, beside which the weights in place of this process are suspended.

    An engine with such weights selects it. For others it is vLLM's own.
    """

    def suspend(self, level: int = 1) -> None:
        """Frees device memory. Nothing runs on the device any more."""
        for model in MODELS:
            model.suspend()
        # No load restores what an engine has beside the weights in place.
        super().suspend(1 if MODELS else level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Maps the weights again, when all ranks wake, and then lets vLLM wake; at failure, all ranks stay asleep."""
        if tags is None or "weights" in tags:
            for model in MODELS:
                begin = time.perf_counter()
                with model.together("wakes") as ranks:
                    model.take(ranks)
                took = (time.perf_counter() - begin) * 1000
                _logger.info("device_ipc: the weights of %s are mapped again after %.1f ms", model.address.name, took)
        super().resume(tags)

"""What the suite asks of vLLM's workers: the class that ``worker_extension_cls`` names. All replies are plain values."""

from __future__ import annotations

import os
from typing import Any

CHUNK = 1 << 24


class Extension:
    """Methods that vLLM adds to those of its worker."""

    # Of vLLM's worker.
    model_runner: Any

    def engines_digests(self) -> dict[str, str]:
        """Returns a checksum of each parameter, which depends on the value and the place of each byte."""
        import torch

        found = {}
        for name, tensor in self.model_runner.get_model().named_parameters(remove_duplicate=False):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            total = 0
            for begin in range(0, flat.numel(), CHUNK):
                piece = flat[begin : begin + CHUNK].to(torch.int64)
                places = torch.arange(begin, begin + piece.numel(), device=piece.device)
                # Products and sums of 64 bits, modulo 2**64.
                total += int(((piece + 1) * (places * 0x9E3779B97F4A7C1 ^ places >> 7)).sum())
            found[name] = f"{total & (1 << 64) - 1:016x} {tuple(tensor.shape)} {tensor.dtype}"
        return found

    def engines_resources(self) -> dict[str, int]:
        """Returns the device memory in use on the device, and the descriptors and mappings of this process."""
        import torch

        torch.accelerator.synchronize()
        free, total = torch.cuda.mem_get_info()
        with open("/proc/self/maps") as maps:
            mappings = sum(1 for _ in maps)
        return {"memory": total - free, "descriptors": len(os.listdir("/proc/self/fd")), "mappings": mappings}

    def engines_replayed(self) -> int:
        """Returns the number of copies of the recorded load, or 0 if there is none."""
        engine: Any = getattr(self, "weight_transfer_engine", None)
        loads = getattr(engine, "_loads", None)
        plan = None if loads is None else loads._plan
        return 0 if plan is None else int(plan.count())

    def engines_cache(self) -> dict[str, int]:
        """Returns the bytes of the KV cache, and of the parameters that are this process's own memory."""
        runner = self.model_runner
        caches = runner.kv_caches if isinstance(runner.kv_caches, list) else list(runner.kv_caches.values())
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in caches}
        own = {one.data_ptr(): one.nbytes for one in runner.get_model().parameters()}
        if hasattr(runner.get_model(), "device_ipc_weights"):
            own.clear()
        return {"cache": sum(storages.values()), "parameters": sum(own.values())}

    def engines_versions(self) -> dict[str, str]:
        """Returns the versions of what runs here."""
        import torch
        import vllm

        import device_ipc

        return {"vllm": str(vllm.__version__), "torch": str(torch.__version__), "device_ipc": str(device_ipc.__version__)}

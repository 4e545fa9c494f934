"""The identity of the processed weights of one rank of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._manifest import Manifest, digest


@dataclass(frozen=True)
class VllmManifest(Manifest):
    """What determines the bytes of the processed weights of one rank of vLLM."""

    expert_parallel: bool
    vllm: str
    """The version of vLLM."""

    @classmethod
    def of(cls, model: Any, parallel: Any, version: str, device: str) -> VllmManifest:
        """Returns the manifest of a rank: ``model`` and ``parallel`` are vLLM's configurations of these names."""
        return cls(
            model=str(model.model),
            revision=model.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=None if model.quantization is None else str(model.quantization),
            tensor_parallel_size=int(parallel.tensor_parallel_size),
            pipeline_parallel_size=int(parallel.pipeline_parallel_size),
            rank=int(parallel.rank) % (int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)),
            device=device,
            config=digest(model.hf_config),
            expert_parallel=bool(parallel.enable_expert_parallel),
            vllm=version,
        )

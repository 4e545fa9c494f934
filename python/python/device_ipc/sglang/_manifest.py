"""The identity of the processed weights of one rank of SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._manifest import Manifest, digest


@dataclass(frozen=True)
class SglangManifest(Manifest):
    """What determines the bytes of the processed weights of one rank of SGLang."""

    expert_parallel_size: int
    attention_data_parallel_size: int
    """The number of groups into which data-parallel attention divides the ranks."""
    attention_backend: str | None
    moe_runner_backend: str | None
    moe_a2a_backend: str | None
    sglang: str
    """The version of SGLang."""

    @classmethod
    def of(cls, model: Any, parallel: Any, arguments: Any, version: str, device: str) -> SglangManifest:
        """Returns the manifest of a rank: of SGLang's ``ModelConfig``, ``ParallelContext`` and ``ServerArgs``."""
        return cls(
            model=str(model.model_path),
            revision=model.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=_text(model.quantization),
            tensor_parallel_size=int(parallel.tp_size),
            pipeline_parallel_size=int(parallel.pp_size),
            rank=int(parallel.tp_size) * int(parallel.pp_rank) + int(parallel.tp_rank),
            device=device,
            config=digest(model.hf_config),
            expert_parallel_size=int(parallel.moe_ep_size),
            attention_data_parallel_size=int(parallel.attn_dp_size),
            attention_backend=_text(arguments.attention_backend),
            moe_runner_backend=_text(arguments.moe_runner_backend),
            moe_a2a_backend=_text(arguments.moe_a2a_backend),
            sglang=version,
        )


def _text(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))

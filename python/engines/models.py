"""Models of which only the configuration exists, and checkpoints of random weights for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
"""A Llama of 20 M parameters."""

LARGE: dict[str, Any] = {
    **SMALL,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The shape of Llama-3-8B: 16 GB."""

TIED: dict[str, Any] = {**SMALL, "tie_word_embeddings": True}
MIXTURE: dict[str, Any] = {
    **SMALL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the checkpoint of a model."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (rows, hidden)
        found[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
        found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if "num_local_experts" in config:
            found[f"{layer}.block_sparse_moe.gate.weight"] = (config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                    found[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
        else:
            found[f"{layer}.mlp.gate_proj.weight"] = found[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
            found[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def checkpoint(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Allocates the tensors of a checkpoint, one after the other."""
    import torch

    return {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes(config).items()}


def fill(state: dict[str, Any], seed: int) -> None:
    """Fills a checkpoint with random weights, which are equal for equal seeds on one kind of device."""
    import torch

    for number, (name, tensor) in enumerate(state.items()):
        generator = torch.Generator(device=tensor.device).manual_seed(seed * 100003 + number)
        if "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0.0, 0.05, generator=generator)


def write(config: dict[str, Any], folder: Path, state: dict[str, Any] | None = None) -> Path:
    """Writes the configuration of a model to a folder, and its weights if there are some."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if state is not None:
        from safetensors.torch import save_file

        save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder

"""A program for test_vllm.py: engines of a real vLLM whose parameters are the memory of one keeper, on the CPU and the mock.

    python vllm_in_place.py

Each engine is a process with vLLM's own model and loader, and with one attention of PyTorch in place of vLLM's kernels.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_HOST_IP="127.0.0.1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.update(DEVICE_IPC_BACKEND="mock", DEVICE_IPC_MOCK="devices=1;like=cuda")

SECONDS = 270
HEADS, TOKENS = 4, 37
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 2, "vocab_size": 1000,
    "max_position_embeddings": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip


def digest(tensors: Any) -> str:
    import torch

    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:12]


def engine(folder: str, number: str, extra: str) -> None:
    """Loads the model; then answers each line of its input with what it has computed."""
    import torch as _torch
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    import device_ipc.vllm

    torch: Any = _torch
    vllm.platforms._current_platform = CpuPlatform()
    # The wheels are built for GPUs.
    operators = torch.library.Library("_C", "DEF")
    operators.define("silu_and_mul(Tensor! out, Tensor x) -> ()")

    def silu_and_mul(out: Any, x: Any) -> None:
        one, other = x.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(one) * other)

    operators.impl("silu_and_mul", silu_and_mul, "CPU")

    from vllm import config as vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model_loader

    device_ipc.vllm.register()
    config = vllm_config.VllmConfig(
        model_config=vllm_config.ModelConfig(model=folder, dtype="bfloat16", seed=int(number), skip_tokenizer_init=True, enforce_eager=True),
        cache_config=vllm_config.CacheConfig(block_size=16),
        device_config=vllm_config.DeviceConfig("cpu"),
        compilation_config=vllm_config.CompilationConfig(custom_ops=["none"]),
        load_config=vllm_config.LoadConfig(load_format="device_ipc", model_loader_extra_config=json.loads(extra)),
    )
    with vllm_config.set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/group-{number}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.manual_seed(int(number))
        model = get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)

    def attend(query: Any, key: Any, value: Any, **_options: Any) -> Any:
        parts = (one.view(TOKENS, HEADS, -1).transpose(0, 1) for one in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1).reshape(query.shape)

    for module in model.modules():
        if isinstance(module, Attention):
            module.forward = attend

    def logits() -> str:
        with vllm_config.set_current_vllm_config(config), torch.no_grad(), set_forward_context(None, config):
            ids = torch.arange(TOKENS)
            return digest([model.compute_logits(model(ids + 3, ids))])

    for line in sys.stdin:
        if line.strip() == "write":
            next(model.parameters()).data.fill_(1)
        print(json.dumps([digest(model.parameters()), logits(), len(list(model.parameters()))]), flush=True)


class Engine:
    def __init__(self, folder: str, number: int, **extra: Any) -> None:
        options = json.dumps({"source": f"keeper:in-place-{os.getpid()}", "in_place": True, **extra})
        arguments = [sys.executable, __file__, folder, str(number), options]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str = "") -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or "null")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def main() -> None:
    import device_ipc.vllm

    engines = []
    with tempfile.TemporaryDirectory() as folder, device_ipc.vllm.WeightKeeper(f"in-place-{os.getpid()}") as keeper:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        threading.Timer(SECONDS, os._exit, [3]).start()
        # Random weights, by the engine's number: those of the others are different unless they are the first's.
        engines = [Engine(folder, 1, publish=True, load_format="dummy"), Engine(folder, 2), Engine(folder, 3)]
        try:
            first = engines[0].ask()
            assert first[2] == 15, first
            assert [one.ask() for one in engines[1:]] == [first, first]
            assert len(keeper.exports) == 1 and len(keeper.exports[0].holders()) == 3
            engines[0].kill()
            assert [one.ask() for one in engines[1:]] == [first, first], "after the publisher was killed"
            engines.append(Engine(folder, 4, publish=True, load_format="dummy"))
            assert engines[3].ask() == first, "a later engine publishes nothing"
            keeper.close()
            assert [one.ask() for one in engines[1:]] == [first] * 3, "after the keeper has ended"
            assert engines[1].ask("write") is None, "a write ends the engine"
            assert engines[2].ask() == first
            print(f"{first[2]} parameters in place, logits equal in 4 engines")
        finally:
            for one in engines:
                one.kill()
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        engine(*sys.argv[1:])
    else:
        main()

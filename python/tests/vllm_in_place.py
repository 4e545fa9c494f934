"""A program for test_vllm.py: engines of a real vLLM whose parameters are the memory of one keeper, on the CPU and the mock, and a trainer.

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
    "max_position_embeddings": 1000, "torch_dtype": "bfloat16", "head_dim": 16, "tie_word_embeddings": False,
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
    # The wheels are built for GPUs, and vLLM waits for one at the end of an update.
    torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None
    operators = torch.library.Library("_C", "DEF")
    operators.define("silu_and_mul(Tensor! out, Tensor x) -> ()")

    def silu_and_mul(out: Any, x: Any) -> None:
        one, other = x.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(one) * other)

    operators.impl("silu_and_mul", silu_and_mul, "CPU")

    from vllm import config as vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model_loader

    device_ipc.vllm.register()
    config = vllm_config.VllmConfig(
        model_config=vllm_config.ModelConfig(model=folder, dtype="bfloat16", seed=int(number), skip_tokenizer_init=True, enforce_eager=True),
        cache_config=vllm_config.CacheConfig(block_size=16),
        device_config=vllm_config.DeviceConfig("cpu"),
        compilation_config=vllm_config.CompilationConfig(custom_ops=["none"]),
        load_config=vllm_config.LoadConfig(**json.loads(extra)),
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

    backend = vllm_config.WeightTransferConfig(backend="device_ipc")
    worker = WeightTransferEngineFactory.create_engine(backend, config, torch.device("cpu"), model)
    for line in sys.stdin:
        call, argument = json.loads(line)
        if call == "write":
            next(model.parameters()).data.fill_(1)
        if call in ("", "write"):
            print(json.dumps([digest(model.parameters()), logits(), len(list(model.parameters()))]), flush=True)
            continue
        with vllm_config.set_current_vllm_config(config):
            if call == "init_weight_transfer_engine":
                worker.init_transfer_engine(worker.parse_init_info(argument))
            else:
                getattr(worker, call)(*argument)
        print("true", flush=True)


class Engine:
    """An engine, and a client of it for trainers."""

    def __init__(self, folder: str, number: int, **options: Any) -> None:
        arguments = [sys.executable, __file__, folder, str(number), json.dumps(options)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, call: str = "", argument: Any = None) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([call, argument]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or "null")

    def init_weight_transfer_engine(self, init_info: "dict[str, Any]") -> None:
        assert self.ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        assert self.ask("start_weight_update", [])

    def update_weights(self, update_info: "dict[str, Any]") -> None:
        assert self.ask("update_weights", [update_info])

    def finish_weight_update(self) -> None:
        assert self.ask("finish_weight_update", [])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def in_place(folder: str, number: int, **further: Any) -> Engine:
    extra = {"source": f"keeper:in-place-{os.getpid()}", "in_place": True, "timeout": SECONDS, **further}
    return Engine(folder, number, load_format="device_ipc", model_loader_extra_config=extra)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    import device_ipc.torch
    import device_ipc.vllm
    from engines import models

    engines = []
    with tempfile.TemporaryDirectory() as folder, device_ipc.vllm.WeightKeeper(f"in-place-{os.getpid()}") as keeper:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        deadline = threading.Timer(SECONDS, os._exit, [3])
        deadline.daemon = True
        deadline.start()
        first, second, third = engines = [in_place(folder, 1, publish=True, load_format="dummy"), in_place(folder, 2), in_place(folder, 3)]
        engines.append(Engine(folder, 4, load_format="dummy"))
        try:
            before = first.ask()
            assert before[2] == 15, before
            assert second.ask() == third.ask() == before
            assert len(keeper.exports) == 1 and len(keeper.exports[0].holders()) == 3
            state = {
                name: device_ipc.torch.empty(shape, torch.bfloat16, "mock:0") for name, shape in models.shapes({**MODEL}).items()
            }
            sender, ordinary = device_ipc.vllm.WeightSender(first), device_ipc.vllm.WeightSender(engines[3])
            for version in range(3):
                for tensor in state.values():
                    tensor.copy_(torch.randn(tensor.shape) / 10)
                sender.send(state.items())
                assert first.ask() == second.ask() == third.ask() == before, "a new version waits"
                for one in (first, second, third):
                    device_ipc.vllm.follow(one)
                ordinary.send(state.items())
                before = engines[3].ask()
                assert first.ask() == second.ask() == third.ask() == before, version
            first.kill()
            assert second.ask() == third.ask() == before, "after the publisher was killed"
            engines.append(in_place(folder, 5, publish=True, load_format="dummy"))
            later = engines[4].ask()
            assert later == before, f"a later engine takes the present version: {later} != {before}"
            keeper.close()
            assert second.ask() == third.ask() == engines[4].ask() == before, "after the keeper has ended"
            assert second.ask("write") is None, "a write ends the engine"
            assert third.ask() == before
            print(f"{before[2]} parameters in place, logits equal in 4 engines, 3 new versions")
        finally:
            for one in engines:
                one.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        engine(*sys.argv[1:])
    else:
        main()

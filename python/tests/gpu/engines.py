"""Models, and the workers' halves of the engines, for test_engines.py and the processes that it starts.

The model is transformers' Llama with random weights, in the configuration of SmolLM-135M, or one of torch's modules without
transformers. With two tensor-parallel ranks, each has half of the rows of every linear layer, and gathers the other half's outputs.
"""

import contextlib
import datetime
import gc
import hashlib
import importlib
import json
import os
import types
from typing import Any

import torch

import device_ipc
import device_ipc.sglang
import device_ipc.torch as dt
import device_ipc.transformers as dtr
import device_ipc.verl as dv
import device_ipc.vllm
import vllm_modules
from sglang_worker import StandInSerializer

transformers: Any = None
with contextlib.suppress(ImportError):
    transformers = importlib.import_module("transformers")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
# Where tensors are opened: the memory of the mock is that of the host, for torch.
PLACE = DEVICE if CUDA else None


class Plain(torch.nn.Module):
    """The model where transformers is not installed."""

    def __init__(self, vocabulary: int, size: int, layers: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, size)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(size) for _ in range(layers))
        self.head = torch.nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        hidden = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers):
            hidden = hidden + layer(norm(hidden))
        return self.head(hidden)


def config(dtype: Any) -> Any:
    """Returns the configuration of SmolLM-135M; on the mock, of a smaller model."""
    small = {"vocab_size": 8192, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
    full = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9 if CUDA else 6, "num_key_value_heads": 3}
    made = transformers.LlamaConfig(
        **(full if CUDA else small), **heads, max_position_embeddings=2048, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    setattr(made, "dtype" if hasattr(made, "dtype") else "torch_dtype", dtype)
    return made


def build(dtype: Any) -> Any:
    """Returns a model with random weights on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with DEVICE:
            if transformers is None:
                model: Any = Plain(49152, 576, 30) if CUDA else Plain(8192, 96, 2)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config(dtype))
    finally:
        torch.set_default_dtype(before)
    # Not model.to(dtype), which changes the buffers of the rotary embedding, too.
    return model.eval().requires_grad_(False)


def trained(dtype: Any) -> Any:
    """Returns the model of the trainer; on the mock, in memory of it."""
    model = build(dtype)
    if not CUDA:
        for parameter in model.parameters():
            parameter.data = dt.empty(parameter.shape, dtype, "mock:0").copy_(parameter.data)
    return model


def train(model: Any, seed: int) -> None:
    """Changes all weights."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0, 0.05)


def outputs(model: Any) -> "tuple[str, list[float]]":
    """Returns a digest of the outputs for some tokens, and a part of the outputs."""
    tokens = torch.arange(3, 19, device=DEVICE)[None]
    with torch.no_grad():
        result = model(tokens)
    logits = getattr(result, "logits", result).contiguous()
    raw = logits.view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(raw).hexdigest(), logits[0, -1, :64].tolist()


def digest(tensors: "dict[str, Any]") -> "dict[str, int]":
    """Returns a sum of the bytes of each tensor."""
    return {name: int(tensor.view(torch.int16).sum(dtype=torch.int64)) for name, tensor in tensors.items()}


def free() -> int:
    """Gives unused memory back. Returns the free bytes of the device, and 0 on the mock."""
    gc.collect()
    device_ipc.close_unused(30)
    if not CUDA:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def delay() -> None:
    """Delays the work that this process submits by about 0.1 s, so that copies of buckets are still to be made when the next come."""
    if CUDA:
        sleep: Any = torch.cuda._sleep
        sleep(200_000_000)


class ColumnParallel(torch.nn.Module):
    """The rows of a linear layer that one tensor-parallel rank has."""

    def __init__(self, linear: Any, rank: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = torch.nn.Parameter(linear.weight.chunk(size)[rank].clone(), requires_grad=False)

    def forward(self, hidden: Any) -> Any:
        part = torch.nn.functional.linear(hidden, self.weight).cpu()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(parts, part)
        return torch.cat(parts, dim=-1).to(hidden.device)


def join_group(path: str, rank: int, size: int) -> None:
    """Joins the processes of the tensor-parallel ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=limit)


class Worker:
    """A worker of an engine, with its model."""

    def __init__(self, rank: int, size: int, dtype: str) -> None:
        self.rank, self.size, self.dtype = rank, size, getattr(torch, dtype)
        self.module: Any = build(self.dtype)
        if size > 1:
            for name, linear in list(self.module.named_modules()):
                if isinstance(linear, torch.nn.Linear):
                    owner, _, last = name.rpartition(".")
                    setattr(self.module.get_submodule(owner), last, ColumnParallel(linear, rank, size))
        self.kept: "list[Any] | None" = None
        self.engine: Any = None

    # What vLLM and SGLang use of a model.

    def parameters(self) -> Any:
        return self.module.parameters()

    def eval(self) -> Any:
        return self

    def modules(self) -> "list[Any]":
        """The layers that vLLM's stand-in would keep weights for until all of them have arrived."""
        return []

    def load_weights(self, weights: Any) -> None:
        """Copies weights, or in an update of vLLM keeps them until its end, as the reload by layers may do."""
        if self.kept is not None:
            self.kept += weights
            return
        own = dict(self.module.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            assert weight.dtype is self.dtype and weight.device == DEVICE, (name, weight.dtype, weight.device)
            if own[name].shape != weight.shape:
                weight = weight.chunk(self.size)[self.rank]
            own[name].copy_(weight)

    def finish(self) -> None:
        kept, self.kept = self.kept, None
        self.load_weights(kept)

    # The halves of the engines.

    def vllm(self, version: str) -> None:
        vllm_modules.install(version)
        device_ipc.vllm.register()
        factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
        options = types.SimpleNamespace(parallel_config=None, model_config=None)
        backend = types.SimpleNamespace(backend="device_ipc")
        self.engine = factory.WeightTransferEngineFactory.create_engine(backend, options, DEVICE, self)

    def call(self, method: str, text: str) -> None:
        """A call of the trainer's client."""
        if method == "init_weight_transfer_engine":
            self.engine.init_transfer_engine(self.engine.parse_init_info(json.loads(text)))
        elif method == "update_weights":
            delay()
            self.engine.update_weights(json.loads(text))
        else:
            getattr(self.engine, method)()

    def vllm_loader(self, source: str) -> None:
        """Starts with the weights of a keeper, as by ``--load-format device_ipc``."""
        vllm_modules.install("0.33")
        device_ipc.vllm.register()
        loaders: Any = importlib.import_module("vllm.model_executor.model_loader").loaders
        loader = loaders["device_ipc"](types.SimpleNamespace(model_loader_extra_config={"source": source}))
        loader.load_model(types.SimpleNamespace(model=self), None)

    def sglang(self, payload: str) -> None:
        # SGLang moves the tensors of an update to the worker's device.
        pairs = [(name, tensor.to(DEVICE)) for name, tensor in StandInSerializer.deserialize(payload)]
        device_ipc.sglang.load_weights(self, pairs)

    def verl(self, handle: str) -> int:
        """Returns the number of buckets."""
        numbers: "list[bool]" = []

        def load(weights: Any, is_last: bool) -> None:
            if not numbers:
                delay()
            self.load_weights(weights)
            numbers.append(is_last)

        dv.BucketedWeightReceiver(handle, DEVICE).receive_weights(load)
        assert numbers == [False] * (len(numbers) - 1) + [True]
        return len(numbers)

    def transformers(self, text: str) -> int:
        """Replaces the model by one whose weights are shared. Returns the device memory that it takes."""
        self.module = None
        before = free()
        if transformers is None:
            self.module = dtr.load(text, lambda: build(self.dtype), device=PLACE)
        else:
            self.module = dtr.from_pretrained(text, config(self.dtype), device=PLACE)
        return before - free()

    def outputs(self) -> "tuple[str, list[float]]":
        return outputs(self.module)

    def shutdown(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

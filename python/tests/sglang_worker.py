"""A tensor-parallel worker for test_sglang.py: reads updates as lines of JSON, and prints the result of each.

With a version, the code that unpickles an update and calls the loader is SGLang's own, of the wheel; else a stand-in.
"""

import base64
import functools
import hashlib
import importlib
import io
import json
import os
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

os.environ.setdefault("DEVICE_IPC_BACKEND", "mock")
os.environ.setdefault("DEVICE_IPC_MOCK", "devices=2;like=cuda")

import torch

import device_ipc
import device_ipc.sglang
import frameworks

UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"


class StandInUnpickler(pickle.Unpickler):
    """As SGLang's SafeUnpickler: permits listed globals only."""

    ALLOWED = {("torch", "ByteTensor"), ("torch.multiprocessing.reductions", "rebuild_cuda_tensor")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


class StandInSerializer:
    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> Any:
        output = bytes(ForkingPickler.dumps(obj))
        return base64.b64encode(output).decode() if output_str else output

    @staticmethod
    def deserialize(data: Any) -> Any:
        data = base64.b64decode(data, validate=True) if isinstance(data, str) else data
        return StandInUnpickler(io.BytesIO(data)).load()


def stand_in_update(self: Any, named_tensors: Any, load_format: Any = None) -> "tuple[bool, str]":
    """As SGLang's WeightUpdater.update_weights_from_tensor."""
    tensors = [(name, tensor.to("cpu")) for name, tensor in named_tensors]
    if load_format not in self.custom_weight_loaders:
        raise NotImplementedError(f"Unknown load_format={load_format}")
    module, _, function = load_format.rpartition(".")
    getattr(importlib.import_module(module), function)(self.get_model(), tensors)
    return True, "Success"


@functools.cache
def serializer(version: "str | None") -> Any:
    """Returns the class MultiprocessingSerializer."""
    if version is None:
        return StandInSerializer
    code = frameworks.definitions(
        frameworks.source("sglang", version, "sglang/srt/utils/common.py"), "MultiprocessingSerializer", "SafeUnpickler"
    )
    return frameworks.run(code, io=io, pickle=pickle, pybase64=base64, ForkingPickler=ForkingPickler)[
        "MultiprocessingSerializer"
    ]


def update_function(version: "str | None", rank: int) -> Any:
    """Returns the method update_weights_from_tensor of the class WeightUpdater."""
    if version is None:
        return stand_in_update
    text = frameworks.source("sglang", version, UPDATER)
    common = frameworks.definitions(frameworks.source("sglang", version, "sglang/srt/utils/common.py"), "dynamic_import")
    names = frameworks.run(common, importlib=importlib)
    names = frameworks.run(
        frameworks.methods(text, "WeightUpdater", "update_weights_from_tensor"),
        torch=torch,
        dynamic_import=names["dynamic_import"],
        monkey_patch_torch_reductions=lambda: None,
        _unsupported_derived_weight_cache_error=lambda *_model: None,
        get_parallel=lambda: types.SimpleNamespace(tp_rank=rank),
        LocalSerializedTensor=(),
    )
    unwrap = frameworks.definitions(text, "_unwrap_tensor")
    names["_unwrap_tensor"] = frameworks.run(unwrap, LocalSerializedTensor=())["_unwrap_tensor"]
    return names["update_weights_from_tensor"]


class Model(torch.nn.Module):
    """A model whose loader copies each weight, as those of SGLang do."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: "dict[str, Any]" = {}
        self.fails = False
        self.stops = False

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if self.stops:
                print(json.dumps("loading"), flush=True)
                sys.stdin.readline()
            self.loaded[name] = weight.clone()
            if self.fails:
                raise ValueError("the model refuses the weight")


class Fused(torch.nn.Module):
    """A model of which each rank has a part of the weights, in fused parameters."""

    SIZE = 16

    def __init__(self, rank: int, ranks: int = 2) -> None:
        super().__init__()
        self.calls = 0
        self.rank, self.rows = rank, self.SIZE // ranks
        self.fused = torch.nn.Parameter(torch.zeros(2 * self.rows, self.SIZE, dtype=torch.bfloat16), requires_grad=False)
        self.out = torch.nn.Parameter(torch.zeros(self.SIZE, self.rows, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        self.calls += 1
        for name, weight in weights:
            if name == "out":
                self.out.data.copy_(weight.narrow(1, self.rank * self.rows, self.rows))
            else:
                part = self.fused.data.narrow(0, self.rows if name == "up" else 0, self.rows)
                part.copy_(weight.narrow(0, self.rank * self.rows, self.rows))

    def answer(self) -> "list[Any]":
        """Returns the digests of the parameters, and the number of calls of load_weights."""
        return [{name: digest(tensor) for name, tensor in self.named_parameters()}, self.calls]


def digest(tensor: Any) -> "list[Any]":
    """Returns type, shape and a hash of the bytes of a tensor."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


def main(version: "str | None", rank: int) -> None:
    # The rank of the worker is that of SGLang's module, which does not import without its dependencies.
    distributed: Any = types.ModuleType("sglang.srt.distributed")
    distributed.get_tensor_model_parallel_rank = lambda: rank
    for name in ("sglang", "sglang.srt"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["sglang.srt.distributed"] = distributed

    model = Model()
    fused = Fused(rank)
    request: "dict[str, Any]" = {}
    updater = types.SimpleNamespace(
        get_model=lambda: fused if request.get("fused") else model,
        device="cpu",
        tp_rank=rank,
        custom_weight_loaders=[device_ipc.sglang.LOAD_FORMAT],
        _assert_weight_cache_inactive=lambda _operation: None,
    )
    update = update_function(version, rank)
    deserialize = serializer(version).deserialize
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        model.fails, model.stops = request.get("fails", False), request.get("stops", False)
        model.loaded.clear()
        try:
            tensors = deserialize(request["payloads"][rank])
            update(updater, named_tensors=tensors, load_format=device_ipc.sglang.LOAD_FORMAT)
            answer: Any = {name: digest(tensor) for name, tensor in model.loaded.items()}
            if request.get("fused"):
                answer = fused.answer()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(None if sys.argv[1] == "stand-in" else sys.argv[1], int(sys.argv[2]))

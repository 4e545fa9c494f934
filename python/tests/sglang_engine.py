"""An engine for test_sglang_in_place.py, on the CPU and the mock: SGLang's hooks, configuration and loaders of a wheel, and a small model.

    python sglang_engine.py VERSION

It answers each line of its input: ``[LOAD_FORMAT, EXTRA_CONFIG, CHANGES]`` loads a model, and the other requests are for that model.
``{"update": TEXTS}``, with one text for each rank, updates it, ``{"release": TAGS}`` and ``{"resume": TAGS}`` do the same as SGLang's requests.
"""

import contextlib
import importlib
import json
import os
import sys
import types
from typing import Any

os.environ.setdefault("DEVICE_IPC_BACKEND", "mock")
os.environ.setdefault("DEVICE_IPC_MOCK", "devices=1;like=cuda")

import torch

import device_ipc.sglang
import frameworks
from sglang_worker import digest, update_function

SIZE = 64
CONTEXT: "dict[str, Any]" = {
    "attention_backend": "triton", "moe_runner_backend": "auto", "moe_a2a_backend": "none", "enable_eplb": False, "cpu_offload_gb": 0,
    "offload_group_size": -1, "tp_size": 1, "pp_size": 1, "tp_rank": 0, "pp_rank": 0, "moe_ep_size": 1, "attn_dp_size": 1,
}  # fmt: skip
"""The arguments of SGLang's server, and the sizes and ranks of its parallel groups."""

context: "dict[str, Any]" = {}
"""Those of the present load, and the ``kind`` of the model: ``plain``, whose weights are not processed, or ``derived``, beside a tensor derived from them."""



class Transposing:
    """Processes weights as some kernels need them, which replaces the parameter."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.calls = getattr(layer, "calls", 0) + 1


class Layer(torch.nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(parts * SIZE, SIZE, dtype=torch.bfloat16), requires_grad=False)
        if "kind" not in context:
            self.quant_method = Transposing()


class Model(torch.nn.Module):
    """Fused and tied parameters, a table of its own, and a tensor that is derived from the weights."""

    table: Any
    derived: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fused, self.embed = Layer(2), Layer(1)
        self.head = self.embed
        self.norm = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("table", torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE).cos())

    def load_weights(self, weights: Any) -> None:
        self.calls += 1
        for name, weight in weights:
            if name in ("gate", "up"):
                self.fused.weight.data[SIZE * (name == "up") :][:SIZE].copy_(weight)
            else:
                (self.norm if name == "norm" else self.embed.weight).data.copy_(weight)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        if context.get("kind") != "plain":
            self.derived = self.fused.weight.data[:SIZE].t().contiguous()

    def answer(self) -> "list[Any]":
        """Returns the digests of all tensors, and of a result that needs each of them."""
        tensors = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
        x = self.table.bfloat16() @ self.embed.weight @ self.fused.weight.reshape(2, SIZE, SIZE).sum(0) * self.norm
        if self.derived is not None:
            tensors["derived"] = self.derived
            x = x + self.derived
        return [{name: digest(one) for name, one in tensors.items()}, digest(x)]


def add(name: str, **values: Any) -> Any:
    """Adds a module, with its parents."""
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update(values)
    parent, _, last = name.rpartition(".")
    if parent:
        module.__package__ = parent
        setattr(add(parent), last, module)
    module.__path__ = []
    return module


def modules(version: str) -> None:
    """Adds the modules of SGLang, and this package to them."""

    def source(path: str) -> str:
        return frameworks.source("sglang", version, f"sglang/srt/{path}.py")

    def own(path: str) -> None:
        """Adds a whole module of the wheel."""
        module = add("sglang.srt." + path.replace("/", "."))
        exec(compile(source(path), path, "exec"), vars(module))

    add("orjson", loads=json.loads)
    add("sglang", __version__=version)
    add("sglang.srt.utils", is_hip=lambda: False)
    add("sglang.srt.configs.modelopt_config", ModelOptConfig=lambda **_options: None)
    own("plugins/hook_registry")
    own("configs/load_config")
    choices: "list[str]" = ["auto", "dummy"]
    add("sglang.srt.server_args", LOAD_FORMAT_CHOICES=choices, add_load_format_choices=choices.extend)
    world = types.SimpleNamespace(broadcast_object=lambda value: context.get("group", value))
    add("sglang.srt.distributed", get_world_group=lambda: world, get_tensor_model_parallel_rank=lambda: context["tp_rank"])
    add("sglang.srt.lora.layers", BaseLayerWithLoRA=type("BaseLayerWithLoRA", (), {}))
    config: Any = sys.modules["sglang.srt.configs.load_config"]

    def fill(model: Any) -> None:
        for one in model.parameters():
            one.data.copy_(torch.rand(one.shape))

    # Where a release has one of these names, its own function or class takes the place.
    names: "dict[str, Any]" = {
        "torch": torch, "LoadConfig": config.LoadConfig, "LoadFormat": config.LoadFormat, "is_cuda_alike": lambda: False,
        "set_default_torch_dtype": lambda _dtype: contextlib.nullcontext(), "_get_quantization_config": lambda *_: None,
        "_initialize_model": lambda *_: Model(), "initialize_dummy_weights": fill, "get_bool_env_var": lambda _name: False,
        "is_pin_memory_available": lambda: False, "monokernel_weights_iterator": lambda model, weights: weights,
        "QuantizeMethodBase": type("QuantizeMethodBase", (), {}),
        "envs": types.SimpleNamespace(SGLANG_CPU_QUANTIZATION=types.SimpleNamespace(get=lambda: False)),
    }  # fmt: skip
    for name in ("contextlib", "abc", "typing"):
        names.update({key: value for key, value in vars(importlib.import_module(name)).items() if not key.startswith("__")})
    for name in ("dataclasses", "logging", "re", "time"):
        names[name] = importlib.import_module(name)
    names["logger"] = names["logging"].getLogger("sglang")
    text = source("model_loader/loader")
    wanted = ["device_loading_context", "_post_load_weights", "post_load_weights", "_modules_with_quant_method", "BaseModelLoader"]
    wanted += ["_validate_default_loader_extra_config", "DefaultModelLoader", "QuantizedRLModelLoader", "DummyModelLoader", "get_model_loader"]
    found = [name for name in wanted if f"\ndef {name}(" in text or f"\nclass {name}(" in text]
    code = frameworks.definitions(text, *found).replace("def device_loading_context", "@contextmanager\ndef device_loading_context")
    names = frameworks.run(code, **names)
    add("sglang.srt.model_loader.loader", **{name: names[name] for name in found})

    def namespace() -> Any:
        return types.SimpleNamespace(**context)

    updater = source("model_executor/model_runner_components/weight_updater")
    wanted = ["update_weights_from_disk", *(name for name in ("begin_weight_update", "end_weight_update") if f"def {name}(" in updater)]
    loader = {"DefaultModelLoader": names["DefaultModelLoader"], "post_load_weights": names.get("post_load_weights")}
    methods = frameworks.run(frameworks.methods(updater, "WeightUpdater", *wanted), torch=torch, **loader)
    members = {"update_weights_from_tensor": update_function(version, 0), **{name: methods[name] for name in wanted}}
    add("sglang.srt.model_executor.model_runner_components.weight_updater", WeightUpdater=type("WeightUpdater", (), members))
    add("sglang.srt.managers.scheduler_components.weight_updater", SchedulerWeightUpdaterManager=manager(source))
    add("sglang.srt.runtime_context", get_server_args=namespace, get_parallel=namespace)
    for _ in range(2):
        device_ipc.sglang.register()
    sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()


def manager(source: Any) -> Any:
    """Returns SGLang's class that releases and resumes memory."""
    text, wanted = source("managers/scheduler_components/weight_updater"), ["release_memory_occupation", "resume_memory_occupation"]
    constants = frameworks.run(source("constants"))
    # No process group, and no device.
    group = types.SimpleNamespace(barrier=lambda _group: None)
    device = types.SimpleNamespace(synchronize=lambda: None)
    stub = types.SimpleNamespace(distributed=group, get_device_module=lambda: device, inference_mode=torch.inference_mode)
    names = {"torch": stub, "ReleaseMemoryOccupationReqOutput": list, "ResumeMemoryOccupationReqOutput": list, **constants}
    names = frameworks.run(frameworks.definitions(text, "_export_static_state", "_import_static_state"), **names)
    names = frameworks.run(frameworks.methods(text, "SchedulerWeightUpdaterManager", *wanted), **names)
    return type("SchedulerWeightUpdaterManager", (), {name: names[name] for name in wanted})


class Saver:
    """Loses the contents of memory that is paused, as SGLang's memory saver does."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def pause(self, tag: str) -> None:
        in_place = self.model.device_ipc_weights
        block = in_place.block
        for one in [self.model.table, self.model.derived] if tag == "weights" else []:
            if one is not None and not block.data_ptr() <= one.data_ptr() < block.data_ptr() + block.numel():
                one.fill_(-1)

    def resume(self, tag: str) -> None:
        pass


def load(load_format: str, extra: Any, changes: "dict[str, Any]") -> Any:
    """Loads a model as SGLang does: a text becomes a configuration, and that a loader."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    context.clear()
    context.update(CONTEXT, **changes)
    values = {"model_path": "llama", "revision": None, "dtype": torch.bfloat16, "quantization": None, "is_draft_model": False, **changes}
    model = types.SimpleNamespace(hf_config=types.SimpleNamespace(to_dict=lambda: {"hidden_size": SIZE}), **values)
    config = LoadConfig(load_format=load_format, model_loader_extra_config=json.dumps(extra), tp_rank=changes.get("load_rank", 0))
    loader = get_model_loader(config, model)
    if config.tp_rank is None:
        raise LookupError(f"{type(loader).__name__} of {config.load_format}")
    return loader.load_model(model_config=model, device_config=types.SimpleNamespace(device=torch.device("cpu")))


class Engine:
    """A model, with the objects of SGLang that update it and release its memory."""

    def __init__(self, load_format: str, extra: "dict[str, Any]", changes: "dict[str, Any]") -> None:
        self.model: Any = load(load_format, extra, changes)
        self.updater: Any = sys.modules["sglang.srt.model_executor.model_runner_components.weight_updater"].WeightUpdater()
        # An engine in place needs no --custom-weight-loader.
        loaders = [] if extra.get("in_place") else [device_ipc.sglang.LOAD_FORMAT]
        self.updater.device, self.updater.tp_rank, self.updater.custom_weight_loaders = "cpu", context["tp_rank"], loaders
        self.updater.get_model, self.updater._assert_weight_cache_inactive = lambda: self.model, lambda _operation: None
        self.flushes = 0
        self.manager: Any = sys.modules["sglang.srt.managers.scheduler_components.weight_updater"].SchedulerWeightUpdaterManager()
        runner = types.SimpleNamespace(model=self.model)
        vars(self.manager).update(
            is_fully_idle=lambda **_options: True, offload_tags=set(), scheduler=None, tp_cpu_group=None, flush_cache=self.flush,
            memory_saver_adapter=Saver(self.model), tp_worker=types.SimpleNamespace(model_runner=runner),
            _assert_weight_cache_inactive=lambda _operation: None,
        )  # fmt: skip

    def flush(self) -> None:
        self.flushes += 1

    def write(self, _value: Any) -> None:
        self.model.norm.data.fill_(1)

    def update(self, texts: "list[str]", load_format: "str | None" = device_ipc.sglang.LOAD_FORMAT) -> Any:
        if hasattr(self.updater, "begin_weight_update"):
            self.updater.begin_weight_update()
        pairs = device_ipc.sglang.named_tensors(*texts)
        answer = self.updater.update_weights_from_tensor(named_tensors=pairs, load_format=load_format)
        if hasattr(self.updater, "end_weight_update"):
            self.updater.end_weight_update(run_post_load=False)
        return answer

    def update_otherwise(self, texts: "list[str]") -> Any:
        return [self.update(texts, None), self.updater.update_weights_from_disk("path", "auto")]

    def release(self, tags: "list[str] | None") -> None:
        self.manager.release_memory_occupation(types.SimpleNamespace(tags=tags))

    def resume(self, tags: "list[str] | None") -> None:
        self.manager.resume_memory_occupation(types.SimpleNamespace(tags=tags))

    def broken(self, dies: bool) -> None:
        import vllm_engines

        vllm_engines.break_take(self.model.device_ipc_weights, dies)

    def facts(self, _value: Any) -> "list[Any]":
        """Returns the addresses of the parameters, and the numbers of loads and flushes."""
        addresses = {name: one.data_ptr() for name, one in self.model.named_parameters()}
        return [addresses, self.model.calls, self.flushes]


def main(version: str) -> None:
    modules(version)
    engines: "list[Engine]" = []
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if isinstance(request, list):
                # A draft model has its target beside it.
                engines = [*engines[-1:], Engine(*request)]
                answer: Any = "ready"
            elif request:
                ((name, value),) = request.items()
                answer = getattr(engines[-1], name)(value)
            else:
                answer = engines[-1].model.answer()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

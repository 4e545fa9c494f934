"""vLLM's modules for test_vllm.py and its worker processes: stand-ins with vLLM's signatures, or the modules of a release.

``tools/fetch_vllm.py`` copies the modules of releases to target/vllm. They are imported without vLLM's dependencies: the modules
that they import are replaced, and nothing of vLLM's distributed or model code runs.
"""

import __future__

import abc
import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import logging
import sys
import time
import types
import weakref
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import device_ipc.vllm

T = TypeVar("T")
U = TypeVar("U")

TARGET = Path(__file__).parents[1] / "target/vllm"

STAND_INS = ["0.25", "0.28", "0.33"]


def releases() -> "list[str]":
    """Returns the releases that were fetched."""
    return sorted(path.name for path in TARGET.glob("*.*") if (path / "vllm").is_dir())


def add(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    # All modules are packages without files, so that nothing of an installed vLLM is imported.
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(module).update(members)
    sys.modules[name] = module
    return module


def remove() -> None:
    """Undoes ``install``."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    for name in ["_v025", "_v028", "_v033", "_loader", "_sleep"]:
        if sys.modules.pop(f"device_ipc.vllm.{name}", None) is not None:
            delattr(device_ipc.vllm, name)


def install(version: str) -> None:
    """Makes the modules of a version importable: a stand-in, or a release that was fetched."""
    remove()
    _surroundings(version)
    if version in STAND_INS:
        _stand_in(version)
    else:
        loader = "vllm.model_executor.model_loader"
        replaced = ["base_loader", "mtp_validation", "reload", "reload.layerwise"]
        sleep = "vllm.device_allocator.sleep_mode_backend"
        for name in [sleep, "vllm.distributed.weight_transfer", *(f"{loader}.{one}" for one in replaced)]:
            sys.modules.pop(name, None)
        for name in ["vllm.device_allocator", "vllm.distributed", loader]:
            importlib.import_module(name).__path__ = [str(TARGET / version / name.replace(".", "/"))]


class LayerInfo:
    """What the reload by layers knows of a layer."""

    def __init__(self) -> None:
        self.load_numel = 0
        self.loaded_weights: "list[Any]" = []
        self.loading = False

    def can_load(self) -> bool:
        return self.loading


class Reload:
    """The reload by layers: the weights of a layer are kept until all have arrived, also if the update fails in between."""

    def __init__(self) -> None:
        self.layers: "weakref.WeakKeyDictionary[Any, LayerInfo]" = weakref.WeakKeyDictionary()

    def get_layerwise_info(self, layer: Any) -> LayerInfo:
        return self.layers.setdefault(layer, LayerInfo())

    def record_metadata_for_reloading(self, model: Any) -> None:
        pass

    def initialize_layerwise_reload(self, model: Any) -> None:
        for layer in model.modules():
            info = self.get_layerwise_info(layer)
            if info.can_load():
                continue
            info.loading = True
            for parameter in layer.parameters(recurse=False):
                self._wrap(layer, info, parameter)

    def _wrap(self, layer: Any, info: LayerInfo, parameter: Any) -> None:
        original = parameter.weight_loader
        total = sum(one.numel() for one in layer.parameters(recurse=False))

        def load(_parameter: Any, tensor: Any) -> None:
            if not info.can_load():
                return
            info.loaded_weights.append(lambda: original(parameter, tensor))
            info.load_numel += parameter.numel()
            if info.load_numel >= total:
                for write in info.loaded_weights:
                    write()
                self._end(layer, info)

        load.original = original  # type: ignore[attr-defined]
        parameter.weight_loader = load

    def _end(self, layer: Any, info: LayerInfo) -> None:
        for parameter in layer.parameters(recurse=False):
            parameter.weight_loader = getattr(parameter.weight_loader, "original", parameter.weight_loader)
        info.load_numel, info.loading = 0, False
        info.loaded_weights.clear()

    def finalize_layerwise_reload(self, model: Any, model_config: Any) -> None:
        for layer in model.modules():
            self._end(layer, self.get_layerwise_info(layer))


@contextlib.contextmanager
def disable_mtp_completeness_check() -> Any:
    yield


class Allocator:
    """vLLM's allocator for sleep, without memory: the calls that it has received."""

    def __init__(self) -> None:
        self.offloaded: "tuple[str, ...] | None" = None
        self.woken: "list[list[str] | None]" = []

    def sleep(self, offload_tags: "tuple[str, ...]") -> None:
        self.offloaded = offload_tags

    def wake_up(self, tags: "list[str] | None") -> None:
        self.woken.append(tags)


class Backend:
    """The sleep mode backend of the stand-ins: vLLM's own, over its allocator."""

    def suspend(self, level: int = 1) -> None:
        sys.modules["vllm.device_allocator"].get_mem_allocator_instance().sleep(("weights",) if level == 1 else ())

    def resume(self, tags: "list[str] | None" = None) -> None:
        sys.modules["vllm.device_allocator"].get_mem_allocator_instance().wake_up(tags)


class Backends:
    """The factory of sleep mode backends of the stand-ins."""

    registry: "ClassVar[dict[str, tuple[str, str]]]"

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.registry:
            raise ValueError(f"Sleep-mode backend '{name}' is already registered.")
        cls.registry[name] = module_path, class_name

    @classmethod
    def create_backend(cls, model_config: Any) -> Any:
        module, name = cls.registry[model_config.sleep_mode_backend]
        return getattr(importlib.import_module(module), name)()


class Any_:
    """A class whose name is all that counts."""


def instrument(**_options: Any) -> Any:
    return lambda function: function


def set_default_torch_dtype(_dtype: Any) -> Any:
    return contextlib.nullcontext()


def _surroundings(version: str) -> None:
    """Adds the modules that those of vLLM import."""
    import torch

    def init_logger(name: str) -> logging.Logger:
        logger: Any = logging.getLogger(name)
        logger.info_once, logger.debug_once, logger.warning_once = logger.info, logger.debug, logger.warning
        return logger  # type: ignore[no-any-return]

    add("vllm").__version__ = version  # type: ignore[attr-defined]
    config = dataclasses.make_dataclass("WeightTransferConfig", [("backend", str, "nccl")])
    add("vllm.envs", VLLM_LOG_MODEL_INSPECTION=False)
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    add("vllm.config", VllmConfig=Any_, ModelConfig=Any_, WeightTransferConfig=config)
    add("vllm.config.load", LoadConfig=Any_)
    add("vllm.config.parallel", ParallelConfig=Any_)
    add("vllm.config.weight_transfer", WeightTransferConfig=config)
    add("vllm.logger", init_logger=init_logger)
    add("vllm.tracing", instrument=instrument)
    add("vllm.platforms", current_platform=types.SimpleNamespace(is_cuda_alike=lambda: False, is_xpu=lambda: False))
    add("vllm.utils")
    add("vllm.utils.mem_utils", format_gib=str)
    add("vllm.utils.torch_utils", set_default_torch_dtype=set_default_torch_dtype)
    add("vllm.distributed")
    add("vllm.distributed.weight_transfer")
    allocator = Allocator()
    add("vllm.device_allocator", get_mem_allocator_instance=lambda: allocator)
    registry = {"cumem": ("vllm.device_allocator.sleep_mode_backend", "CuMemBackend")}
    backends = type("SleepModeBackendFactory", (Backends,), {"registry": registry})
    add("vllm.device_allocator.sleep_mode_backend", CuMemBackend=Backend, SleepModeBackendFactory=backends)
    add("vllm.model_executor")
    loaders: "dict[str, Any]" = {}

    def register_model_loader(load_format: str) -> Any:
        return lambda loader: loaders.setdefault(load_format, loader)

    model_loader = "vllm.model_executor.model_loader"
    add(model_loader, register_model_loader=register_model_loader, loaders=loaders)
    reload = Reload()
    functions = {name: getattr(reload, name) for name in ["record_metadata_for_reloading", "initialize_layerwise_reload"]}
    functions["finalize_layerwise_reload"] = functions["finalize_layerwise_processing"] = reload.finalize_layerwise_reload
    add(f"{model_loader}.reload", **functions)
    add(f"{model_loader}.reload.layerwise", get_layerwise_info=reload.get_layerwise_info)
    add(f"{model_loader}.weight_utils", default_weight_loader=lambda parameter, tensor: parameter.data.copy_(tensor))
    add(
        f"{model_loader}.utils",
        initialize_model=lambda vllm_config, model_config, prefix: vllm_config.model,
        process_weights_after_loading=lambda model, model_config, device: None,
    )
    if version not in ["0.25", "0.25.1", "0.26.0"]:
        add(f"{model_loader}.mtp_validation", disable_mtp_completeness_check=disable_mtp_completeness_check)
    add("vllm.model_executor.layers")
    add("vllm.model_executor.layers.attention", Attention=Any_, MLAAttention=Any_, is_deferred_attention_layer=lambda _: False)
    add("vllm.model_executor.layers.quantization")
    add("vllm.model_executor.layers.quantization.base_config", QuantizeMethodBase=Any_)
    add("vllm.model_executor.layers.quantization.online")
    add("vllm.model_executor.layers.quantization.online.base", OnlineQuantizationConfig=Any_)
    # vLLM calls these at the end of an update and of a load; they need a device.
    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None  # type: ignore[assignment]

    class BaseModelLoader(abc.ABC):
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

        @abc.abstractmethod
        def download_model(self, model_config: Any) -> None: ...
        @abc.abstractmethod
        def load_weights(self, model: Any, model_config: Any) -> None: ...

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            utils: Any = sys.modules[f"{model_loader}.utils"]
            model = utils.initialize_model(vllm_config, model_config, prefix)
            self.load_weights(model, model_config)
            utils.process_weights_after_loading(model, model_config, None)
            return model.eval()

    add(f"{model_loader}.base_loader", BaseModelLoader=BaseModelLoader)


def _stand_in(version: str) -> None:
    """Adds the package weight_transfer with the signatures of a version."""
    import torch

    class WeightTransferEngine(abc.ABC, Generic[T, U]):
        init_info_cls: Any
        update_info_cls: Any

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
            self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

        def parse_init_info(self, init_dict: "dict[str, Any]") -> Any:
            try:
                return self.init_info_cls(**init_dict)
            except TypeError as error:
                raise ValueError(f"Invalid init_info: {error}") from error

        def parse_update_info(self, update_dict: "dict[str, Any]") -> Any:
            try:
                return self.update_info_cls(**update_dict)
            except TypeError as error:
                raise ValueError(f"Invalid update_info: {error}") from error

        @abc.abstractmethod
        def init_transfer_engine(self, init_info: Any) -> None: ...
        @abc.abstractmethod
        def start_weight_update(self) -> None: ...
        @abc.abstractmethod
        def finish_weight_update(self) -> None: ...

        def update_weights(self, update_info: "dict[str, Any]") -> None:
            self.receive_weights(self.parse_update_info(update_info))
            torch.accelerator.synchronize()

        @abc.abstractmethod
        def receive_weights(self, update_info: Any) -> None: ...
        @abc.abstractmethod
        def shutdown(self) -> None: ...

        if version == "0.25":

            @staticmethod
            @abc.abstractmethod
            def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...

    class Factory:
        _registry: "dict[str, Any]"

        def __init_subclass__(cls) -> None:
            cls._registry = {}

        @classmethod
        def register_engine(cls, name: str, module_path_or_cls: Any, class_name: "str | None" = None) -> None:
            if name in cls._registry:
                raise ValueError(f"Weight transfer engine '{name}' is already registered.")
            assert isinstance(module_path_or_cls, str) and class_name is not None
            cls._registry[name] = lambda: getattr(importlib.import_module(module_path_or_cls), class_name)

        @classmethod
        def _check(cls, name: str) -> None:
            if name not in cls._registry:
                raise ValueError(f"Invalid weight transfer backend: {name}. Available engines: {list(cls._registry)}")

    class WeightTransferEngineFactory(Factory):
        @classmethod
        def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
            cls._check(config.backend)
            return cls._registry[config.backend]()(config, vllm_config, device, model)

    package = "vllm.distributed.weight_transfer"
    base = add(f"{package}.base", WeightTransferEngine=WeightTransferEngine)
    factory = add(f"{package}.factory", WeightTransferEngineFactory=WeightTransferEngineFactory)
    if version == "0.25":
        return

    @dataclasses.dataclass
    class TrainerInitInfo:
        backend: ClassVar[str]
        rank: int = dataclasses.field(kw_only=True)

        @property
        def is_sender(self) -> bool:
            return self.rank == 0

    class TrainerWeightTransferEngine(abc.ABC, Generic[T]):
        if version == "0.33":

            def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
                self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

        else:

            def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:  # type: ignore[misc]
                self.client, self.source, self.is_sender = client, source, is_sender

        @classmethod
        @abc.abstractmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any: ...
        @abc.abstractmethod
        def send_weights(self) -> None: ...

        def shutdown(self) -> None: ...

    class WeightTransferTrainerFactory(Factory):
        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            cls._check(init_info.backend)
            return cls._registry[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)

    @dataclasses.dataclass(frozen=True)
    class ParamMeta:
        name: str
        dtype: Any
        shape: "tuple[int, ...]"

    class WeightSource(abc.ABC):
        if version == "0.33":

            def implements_iter_full(self) -> bool:
                return type(self).iter_full is not WeightSource.iter_full

            def owned_names(self, rank: int) -> "list[str]":
                return [meta.name for meta in self.metadata]  # type: ignore[attr-defined]

            def iter_full(self) -> Any:
                raise NotImplementedError

    vars(base).update(TrainerInitInfo=TrainerInitInfo, TrainerWeightTransferEngine=TrainerWeightTransferEngine)
    vars(base).update(ParamMeta=ParamMeta, WeightSource=WeightSource)
    vars(factory).update(WeightTransferTrainerFactory=WeightTransferTrainerFactory)


class Worker:
    """The methods of vLLM's worker that concern updates, for the versions without a release."""

    rank: int
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active = False

    def init_weight_transfer_engine(self, init_info: "dict[str, Any]") -> None:
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active. Call finish_weight_update first.")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: Any) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        parallel = self.vllm_config.parallel_config
        if isinstance(update_info, list):
            update_info = update_info[parallel.data_parallel_index * parallel.world_size + self.rank]
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def sleep(self, level: int = 1) -> None:
        self._backend().suspend(level)

    def wake_up(self, tags: "list[str] | None" = None) -> None:
        self._backend().resume(tags)

    def _backend(self) -> Any:
        factory: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackendFactory
        return factory.create_backend(self.vllm_config.model_config)


WORKER_METHODS = [
    "sleep",
    "wake_up",
    "_get_sleep_mode_backend",
    "sleep_mode_backend",
    "_save_sleep_parameters",
    "get_draft_model",
    "_check_weight_transfer_engine",
    "init_weight_transfer_engine",
    "_start_weight_update",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
]


def worker_class(version: str) -> Any:
    """Returns the class of vLLM's worker, of which a release has the methods that concern updates only: the rest needs a device."""
    if version in STAND_INS:
        return Worker
    tree = ast.parse((TARGET / version / "vllm/v1/worker/gpu_worker.py").read_text())
    (worker,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Worker"]
    worker.bases = []
    worker.body = [node for node in worker.body if isinstance(node, ast.FunctionDef) and node.name in WORKER_METHODS]
    tree.body = [worker]
    worker.body.append(ast.parse("def synchronize_device(self): pass").body[0])
    names: "dict[str, Any]" = {
        "set_current_vllm_config": lambda _: contextlib.nullcontext(),
        "torch": types.SimpleNamespace(accelerator=types.SimpleNamespace(synchronize=lambda: None, get_memory_info=lambda: (0, 0))),
        "current_platform": types.SimpleNamespace(is_rocm=lambda: False),
        "time": time,
        "logger": logging.getLogger("vllm"),
        "format_gib": str,
        "has_kv_transfer_group": lambda: False,
    }
    exec(compile(tree, "gpu_worker.py", "exec", __future__.annotations.compiler_flag), names)
    return names["Worker"]


def make_worker(version: str, model: Any, device: Any, rank: int, world_size: int, data_parallel_index: int) -> Any:
    """Returns a worker of vLLM with a model, whose weight transfer backend is ``device_ipc``."""
    install(version)
    device_ipc.vllm.register()
    # vLLM calls plugins again.
    device_ipc.vllm.register()
    return worker_of(version, model, device, rank, world_size, data_parallel_index)


def worker_of(version: str, model: Any, device: Any, rank: int, world_size: int, data_parallel_index: int, model_config: Any = None) -> Any:
    """Returns a worker as ``make_worker``, of the version that is installed already."""
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
    reload.record_metadata_for_reloading(model)
    # vLLM 0.29 and 0.30 read data_parallel_rank.
    index = {"data_parallel_index": data_parallel_index, "data_parallel_rank": data_parallel_index}
    parallel = types.SimpleNamespace(world_size=world_size, **index)
    worker = worker_class(version).__new__(worker_class(version))
    worker.rank, worker.vllm_config = rank, types.SimpleNamespace(parallel_config=parallel, model_config=model_config)
    worker.model_config, worker._sleep_mode_backend = model_config, None
    worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers, worker._sleep_saved_parameters = {}, {}, {}
    worker._weight_update_active = worker._weight_update_is_draft = False
    nothing = dict.fromkeys(["reset_lora_state", "post_kv_cache_wake_up", "get_draft_model"], lambda: None)
    worker.model_runner = types.SimpleNamespace(model=model, **nothing)
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    backend = types.SimpleNamespace(backend="device_ipc")
    worker.weight_transfer_engine = factory.WeightTransferEngineFactory.create_engine(backend, worker.vllm_config, device, model)
    return worker


def source(names: "list[str]", state: "dict[str, Any]") -> Any:
    """Returns a source of the weights of a state that declares ``names`` of it, as a user of this version writes it."""
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")

    def metadata(self: Any) -> "list[Any]":
        return [base.ParamMeta(name, state[name.rstrip("?")].dtype, tuple(state[name.rstrip("?")].shape)) for name in names]

    def weights(self: Any) -> Any:
        return iter(state.items())

    members: "dict[str, Any]"
    if hasattr(base.WeightSource, "iter_full"):
        members = {"metadata": functools.cached_property(metadata), "iter_full": weights}
        members["metadata"].__set_name__(None, "metadata")
    else:
        members = {"metadata": metadata, "__iter__": weights}
    return type("Source", (base.WeightSource,), members)()

"""vLLM's modules for test_vllm.py and its worker processes: stand-ins with vLLM's signatures, or the modules of a release.

``tools/fetch_vllm.py`` copies the modules of releases to target/vllm. They are imported without vLLM's dependencies: the modules
that they import are replaced, and nothing of vLLM's distributed or model code runs.
"""

import abc
import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import logging
import sys
import types
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
    for name in ["_v025", "_v028", "_v033", "_loader"]:
        if sys.modules.pop(f"device_ipc.vllm.{name}", None) is not None:
            delattr(device_ipc.vllm, name)


def install(version: str) -> None:
    """Makes the modules of a version importable: a stand-in, or a release that was fetched."""
    remove()
    _surroundings(version)
    if version in STAND_INS:
        _stand_in(version)
    else:
        source = TARGET / version / "vllm/distributed/weight_transfer"
        for name in ["vllm.distributed.weight_transfer", "vllm.model_executor.model_loader.base_loader"]:
            del sys.modules[name]
        importlib.import_module("vllm.distributed").__path__ = [str(source.parent)]
        importlib.import_module("vllm.model_executor.model_loader").__path__ = [
            str(TARGET / version / "vllm/model_executor/model_loader")
        ]


class Reload:
    """The reload by layers, of which the tests need one property: tensors are kept until the end of the update."""

    @staticmethod
    def initialize_layerwise_reload(model: Any) -> None:
        model.kept = []

    @staticmethod
    def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
        model.finish()


@contextlib.contextmanager
def disable_mtp_completeness_check() -> Any:
    yield


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
        logger.info_once, logger.debug_once = logger.info, logger.debug
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
    add("vllm.model_executor")
    loaders: "dict[str, Any]" = {}

    def register_model_loader(load_format: str) -> Any:
        return lambda loader: loaders.setdefault(load_format, loader)

    model_loader = "vllm.model_executor.model_loader"
    add(model_loader, register_model_loader=register_model_loader, loaders=loaders)
    add(
        f"{model_loader}.reload",
        initialize_layerwise_reload=Reload.initialize_layerwise_reload,
        finalize_layerwise_reload=Reload.finalize_layerwise_reload,
        finalize_layerwise_processing=Reload.finalize_layerwise_reload,
    )
    add(
        f"{model_loader}.utils",
        initialize_model=lambda vllm_config, model_config, prefix: vllm_config.model,
        process_weights_after_loading=lambda model, model_config, device: None,
    )
    if version not in ["0.25", "0.25.1", "0.26.0"]:
        add(f"{model_loader}.mtp_validation", disable_mtp_completeness_check=disable_mtp_completeness_check)
    add("vllm.model_executor.layers")
    add("vllm.model_executor.layers.quantization")
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
            self.load_weights(vllm_config.model, model_config)
            return vllm_config.model.eval()

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

    class WeightTransferEngineFactory(Factory):
        @classmethod
        def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
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

"""The load format ``device_ipc``: the weights of a keeper, or of any export, instead of files. Its import registers it."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

import torch
import vllm
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .. import torch as dt
from .._errors import UnsupportedError
from .._in_place import Options, Source, Unfilled, described, load
from . import BACKEND
from ._manifest import VllmManifest

_logger = init_logger(f"vllm.{__name__}")


@register_model_loader("device_ipc")  # type: ignore[untyped-decorator,unused-ignore]
class ModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Copies weights from memory that another process shares, such as a keeper's, to the parameters of the model.

    ``model_loader_extra_config`` has ``source``, such as ``"keeper:llama"``, and optionally ``timeout`` in seconds. With ``in_place``, the
    parameters are the memory of a ``device_ipc.vllm.WeightKeeper``, and no copy; with ``publish`` too, this engine may be the one
    that fills it, with weights in the format ``load_format`` (``"auto"``).
    """

    _unfilled: Any = None
    """The state of a load without weights."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options = Options.parse(load_config.model_loader_extra_config)

    def download_model(self, model_config: Any) -> None:
        """Downloads the weights that this engine may have to publish; else does nothing, because they are in device memory."""
        if self.options.publish:
            self._normal_loader().download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Loads the weights on the device of the model's parameters."""
        if self._unfilled is not None:
            self._unfilled.fill(model)
            return
        devices = (parameter.device for parameter in model.parameters())
        device = next((device for device in devices if device.type != "meta"), None)
        # The load only reads.
        with dt.open(self.options.source, device=device, timeout=self.options.timeout, allow_read_only=True) as weights:
            model.load_weights(list(weights.items()))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Returns the model with its weights."""
        if not self.options.in_place:
            return super().load_model(vllm_config, model_config, prefix)
        if getattr(model_config, "runner_type", "") == "draft":
            # The keeper has the weights of the target.
            return self._normal_loader().load_model(vllm_config, model_config, prefix)

        def load_normally() -> Any:
            return self._normal_loader().load_model(vllm_config, model_config, prefix)

        def load_without_weights(unfilled: Unfilled) -> Any:
            self._unfilled = unfilled
            try:
                return super(ModelLoader, self).load_model(vllm_config, model_config, prefix)
            finally:
                self._unfilled = None

        _refuse_unsupported(vllm_config)
        # The device with its number.
        device = torch.empty(0, device=self.load_config.device or vllm_config.device_config.device).device
        manifest = VllmManifest.of(model_config, vllm_config.parallel_config, str(vllm.__version__), described(device).name)
        with contextlib.closing(Source.of(self.options)) as source:
            model = load(source, manifest, device, load_normally, load_without_weights, _group(vllm_config), _logger)
        if getattr(vllm_config.model_config, "sleep_mode_backend", "") == "cumem":
            # The worker makes its backend at the first sleep. vLLM's own keeps the mapping, and discards at level 2 what only a load restores.
            vllm_config.model_config.sleep_mode_backend = BACKEND
        return model

    def _normal_loader(self) -> Any:
        """Returns the loader of the format in which the weights are published."""
        from vllm.model_executor.model_loader import get_model_loader

        config = copy.copy(self.load_config)
        config.load_format, config.model_loader_extra_config = self.options.load_format, {}
        return get_model_loader(config)


def _group(vllm_config: Any) -> str:
    """Returns a text that the ranks of an engine have in common, and no other engine."""
    parallel = vllm_config.parallel_config
    instance = vllm_config.instance_id
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        # Each rank has made a configuration of its own.
        instance = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"{instance}.{getattr(parallel, 'data_parallel_index', 0)}"


def _refuse_unsupported(vllm_config: Any) -> None:
    """Raises ``UnsupportedError`` for a configuration in which vLLM writes or moves the parameters."""
    parallel, offload = vllm_config.parallel_config, getattr(vllm_config, "offload_config", None)
    if getattr(parallel, "enable_eplb", False):
        raise UnsupportedError("--enable-eplb moves experts in the parameters, which are read-only in place; load without in_place")
    if getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0) or getattr(getattr(offload, "prefetch", None), "offload_group_size", 0):
        raise UnsupportedError("weights in place cannot be offloaded to the host; load without in_place")
    if getattr(vllm_config.model_config, "sleep_preserve_parameter_names", None):
        raise UnsupportedError("weights in place are read-only, and none is lost in sleep; load without sleep_preserve_parameter_names")

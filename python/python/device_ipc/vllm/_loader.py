"""The load format ``device_ipc``: the weights of a keeper, or of any export, instead of files. Its import registers it."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .. import torch as dt
from . import BACKEND
from ._manifest import Manifest


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
        options = dict(load_config.model_loader_extra_config or {})
        self.source = options.pop("source", None)
        self.timeout = options.pop("timeout", 300.0)
        self.in_place = options.pop("in_place", False)
        self.publish = options.pop("publish", False)
        self.load_format = options.pop("load_format", "auto")
        if not isinstance(self.source, str):
            raise ValueError("""--load-format device_ipc needs --model-loader-extra-config '{"source": "keeper:NAME"}'""")
        if options:
            raise ValueError(
                f"model_loader_extra_config has unknown keys: {sorted(options)}; permitted are source, timeout, in_place, publish and load_format"
            )
        if self.publish and not self.in_place:
            raise ValueError('model_loader_extra_config has "publish", which needs "in_place": true')
        if self.in_place and not self.source.startswith("keeper:"):
            raise ValueError(f'"in_place" needs a source "keeper:NAME" or "keeper:UID/NAME", and not {self.source!r}')

    def download_model(self, model_config: Any) -> None:
        """Downloads the weights that this engine may have to publish; else does nothing, because they are in device memory."""
        if self.publish:
            self._normal_loader().download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Loads the weights on the device of the model's parameters."""
        if self._unfilled is not None:
            self._unfilled.fill(model)
            return
        devices = (parameter.device for parameter in model.parameters())
        device = next((device for device in devices if device.type != "meta"), None)
        # The load only reads.
        with dt.open(self.source, device=device, timeout=self.timeout, allow_read_only=True) as weights:
            model.load_weights(list(weights.items()))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Returns the model with its weights."""
        if not self.in_place:
            return super().load_model(vllm_config, model_config, prefix)
        if getattr(model_config, "runner_type", "") == "draft":
            # The keeper has the weights of the target.
            return self._normal_loader().load_model(vllm_config, model_config, prefix)
        import torch
        import vllm

        from . import _in_place

        def load_normally() -> Any:
            return self._normal_loader().load_model(vllm_config, model_config, prefix)

        def load_without_weights(unfilled: _in_place.Unfilled) -> Any:
            self._unfilled = unfilled
            try:
                return super(ModelLoader, self).load_model(vllm_config, model_config, prefix)
            finally:
                self._unfilled = None

        _in_place.refuse_unsupported(vllm_config)
        # The device with its number.
        device = torch.empty(0, device=self.load_config.device or vllm_config.device_config.device).device
        manifest = Manifest.of(model_config, vllm_config.parallel_config, str(vllm.__version__), _in_place.described(device).name)
        address = _in_place.Address.parse(self.source)
        with contextlib.closing(_in_place.Source(address, self.publish, self.timeout)) as source:
            model = _in_place.load(source, manifest, device, load_normally, load_without_weights, _group(vllm_config))
        if getattr(vllm_config.model_config, "sleep_mode_backend", "") == "cumem":
            # The worker makes its backend at the first sleep. vLLM's own keeps the mapping, and discards at level 2 what only a load restores.
            vllm_config.model_config.sleep_mode_backend = BACKEND
        return model

    def _normal_loader(self) -> Any:
        """Returns the loader of the format in which the weights are published."""
        from vllm.model_executor.model_loader import get_model_loader

        config = copy.copy(self.load_config)
        config.load_format, config.model_loader_extra_config = self.load_format, {}
        return get_model_loader(config)


def _group(vllm_config: Any) -> str:
    """Returns a text that the ranks of an engine have in common, and no other engine."""
    parallel = vllm_config.parallel_config
    instance = vllm_config.instance_id
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        # Each rank has made a configuration of its own.
        instance = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"{instance}.{getattr(parallel, 'data_parallel_index', 0)}"

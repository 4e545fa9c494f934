"""The load format ``device_ipc``: the weights of a keeper, or of any export, instead of files. Its import registers it."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .. import torch as dt


@register_model_loader("device_ipc")  # type: ignore[untyped-decorator,unused-ignore]
class ModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Copies weights from memory that another process shares, such as a keeper's, to the parameters of the model.

    ``model_loader_extra_config`` has ``source``, such as ``"keeper:llama"``, and optionally ``timeout`` in seconds.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        options = dict(load_config.model_loader_extra_config or {})
        self.source = options.pop("source", None)
        self.timeout = options.pop("timeout", 300.0)
        if not isinstance(self.source, str):
            raise ValueError("""--load-format device_ipc needs --model-loader-extra-config '{"source": "keeper:NAME"}'""")
        if options:
            raise ValueError(f"model_loader_extra_config has unknown keys: {sorted(options)}; permitted are source and timeout")

    def download_model(self, model_config: Any) -> None:
        """Does nothing: the weights are in device memory."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Loads the weights on the device of the model's parameters."""
        devices = (parameter.device for parameter in model.parameters())
        device = next((device for device in devices if device.type != "meta"), None)
        # The load only reads.
        with dt.open(self.source, device=device, timeout=self.timeout, allow_read_only=True) as weights:
            model.load_weights(list(weights.items()))

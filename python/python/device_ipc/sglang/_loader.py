"""The load format ``device_ipc``: the weights of a keeper, or of any export, instead of files."""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import Any

import sglang
import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.distributed import get_world_group
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.runtime_context import get_parallel, get_server_args

from .. import torch as dt
from .._errors import UnsupportedError
from .._in_place import Options, Source, Unfilled, described, load
from ._manifest import SglangManifest
from ._updates import install

_logger = logging.getLogger(__name__)


class ModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Copies weights from memory that another process shares, such as a keeper's, to the parameters of the model.

    ``model_loader_extra_config`` has ``source``, such as ``"keeper:llama"``, and optionally ``timeout`` in seconds. With ``in_place``, the
    parameters are the memory of a ``device_ipc.sglang.WeightKeeper``, and no copy; with ``publish`` too, this engine may be the one
    that fills it, with weights in the format ``load_format`` (``"auto"``).
    """

    _unfilled: Unfilled | None = None
    """The state of a load without weights."""

    def __init__(self, load_config: Any) -> None:
        self.options = Options.parse(load_config.model_loader_extra_config)
        # SGLang loads further weights by this configuration, such as those of adapters, which are files.
        load_config.load_format, load_config.model_loader_extra_config = LoadFormat(self.options.load_format), {}
        super().__init__(load_config)

    def download_model(self, model_config: Any) -> None:
        """Downloads the weights that this engine may have to publish; else does nothing, because they are in device memory."""
        if self.options.publish:
            get_model_loader(self.load_config, model_config).download_model(model_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """Returns the model with its weights."""
        arguments: dict[str, Any] = {"model_config": model_config, "device_config": device_config}
        if not self.options.in_place:
            return super().load_model(**arguments)

        def load_normally() -> Any:
            return get_model_loader(self.load_config, model_config).load_model(**arguments)

        def load_without_weights(unfilled: Unfilled) -> Any:
            self._unfilled = unfilled
            try:
                return super(ModelLoader, self).load_model(**arguments)
            finally:
                self._unfilled = None

        if model_config.is_draft_model:
            # The keeper has the weights of the target.
            return load_normally()
        _refuse_unsupported(model_config, get_server_args())
        # The device with its number.
        device = torch.empty(0, device=device_config.device).device
        version = str(sglang.__version__)
        manifest = SglangManifest.of(model_config, get_parallel(), get_server_args(), version, described(device).name)
        # A text that the ranks of this engine have in common, and no other engine.
        group = get_world_group().broadcast_object(uuid.uuid4().hex)
        with contextlib.closing(Source.of(self.options)) as source:
            model = load(source, manifest, device, load_normally, load_without_weights, group, _logger)
        install(model)
        return model

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        """Loads the weights on the device of the model's parameters, and has SGLang process them.

        ``weights`` would be read from files, and is not used.
        """
        post = DefaultModelLoader.load_weights_and_postprocess
        if self._unfilled is None:
            device = next((one.device for one in model.parameters() if not one.is_meta), None)
            with dt.open(self.options.source, device=device, timeout=self.options.timeout, allow_read_only=True) as state:
                post(model, list(state.items()), target_device)
            return
        unfilled = self._unfilled

        def fill(_weights: Any) -> None:
            unfilled.fill(model)
            if hasattr(model, "post_load_weights"):
                # As the model's own function does at its end, and SGLang's loaders that bypass it.
                model.post_load_weights()

        vars(model)["load_weights"] = fill
        try:
            post(model, [], target_device)
        finally:
            del vars(model)["load_weights"]


def _refuse_unsupported(model: Any, arguments: Any) -> None:
    """Raises ``UnsupportedError`` for a configuration in which SGLang writes, moves or quantises the parameters."""
    if model.quantization is not None:
        raise UnsupportedError(f"weights of SGLang that are quantised ({model.quantization}) are not supported in place; load without in_place")
    if arguments.enable_eplb:
        raise UnsupportedError("--enable-eplb moves experts in the parameters, which are read-only in place; load without in_place")
    if arguments.cpu_offload_gb or arguments.offload_group_size > 0:
        raise UnsupportedError("weights in place cannot be offloaded to the host; load without in_place")

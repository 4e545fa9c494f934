"""vLLM: weights from a trainer to the workers of a running engine, and from a keeper to an engine that starts.

vLLM finds this package by its entry point: ``--weight-transfer-config '{"backend": "device_ipc"}'`` and ``--load-format device_ipc``
need no change of vLLM. Importing this module does not import vllm or torch.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from typing import Any

from .._weight_keeper import WeightKeeper
from ._http import HTTPClient
from ._sender import WeightSender, updating

__all__ = ["BACKEND", "HTTPClient", "WeightKeeper", "WeightSender", "follow", "register"]

BACKEND = "device_ipc"
"""The name of the weight transfer backend, of the load format, and of the sleep mode backend."""

_logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the weight transfer engines, the model loader and the sleep mode backend with the installed vLLM.

    vLLM calls it in each of its processes, by the entry point group ``vllm.general_plugins``. A trainer need not call it:
    ``TrainerInitInfo`` does. Calling it again changes nothing. With a vLLM that is too old, it logs a warning and registers nothing.
    Raises ``ValueError`` if another package has registered the name ``device_ipc``.
    """
    try:
        module = _family()
    except ImportError as error:
        _logger.warning("device_ipc registers no weight transfer engine with vLLM: %s", error)
    else:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
        _register(factory.WeightTransferEngineFactory, module, "WorkerEngine")
        if not module.endswith("_v025"):
            _register(factory.WeightTransferTrainerFactory, module, "TrainerEngine")
    try:
        sleep = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    except ModuleNotFoundError:
        _logger.debug("device_ipc registers no sleep mode backend with vLLM, which has only its own")
    else:
        _register(sleep.SleepModeBackendFactory, f"{__name__}._sleep", "SleepBackend")
    try:
        importlib.import_module(f"{__name__}._loader")
    except ImportError as error:
        _logger.warning("device_ipc registers no model loader with vLLM: %s", error)


def follow(client: Any) -> None:
    """Has an engine whose weights are in place take the version that an update of another engine, or of itself, has published.

    ``client`` is as for ``WeightSender``. Pause the engine before: nothing may run while its weights are exchanged, and cached
    results are those of the former ones. Raises the exceptions of the client: all ranks have the former version then, unless the engine had
    skipped one.
    """
    client.init_weight_transfer_engine({})
    with updating(client):
        client.update_weights({"follow": True})


_registered: weakref.WeakSet[Any] = weakref.WeakSet()
"""The factories that know this backend. They refuse a second registration, and have no public list of names."""


def _register(factory: Any, module: str, name: str) -> None:
    if factory not in _registered:
        register = getattr(factory, "register_engine", None) or factory.register_backend
        register(BACKEND, module, name)
        _registered.add(factory)


def _family() -> str:
    """Returns the name of the module for the signatures of the installed vLLM."""
    try:
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("vllm"):
            raise
        raise ImportError("it needs vLLM 0.25 or later, and finds none with weight transfer; upgrade vLLM") from None
    engine = base.WeightTransferEngine
    if not hasattr(engine, "start_weight_update"):
        raise ImportError("the installed vLLM is older than 0.25, whose engines cannot be extended like this; upgrade vLLM")
    if hasattr(engine, "trainer_send_weights"):
        return f"{__name__}._v025"
    return f"{__name__}._v033" if hasattr(base.WeightSource, "iter_full") else f"{__name__}._v028"


def __getattr__(name: str) -> Any:
    """Returns ``TrainerInitInfo``, a subclass of vLLM's class of the same name."""
    if name != "TrainerInitInfo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _family()
    if module.endswith("_v025"):
        raise AttributeError("the trainer's engine needs vLLM 0.28 or later; use device_ipc.vllm.WeightSender with this one")
    register()
    return importlib.import_module(module).TrainerInitInfo

"""Updates of an engine whose weights are in place, and the time in which its memory is released.

An update by this package's loader names the keeper, whose present version the engine takes, or tensors, which the engine loads into other memory
of the keeper, publishes and takes. All ranks of the engine act together, through the keeper. Every other update would write memory
that is read-only, which ends the engine, and is answered with an error.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
import types
import weakref
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .. import torch as dt
from .._errors import UnsupportedError
from .._in_place import InPlace, Update, held
from .._manifest import IN_PLACE
from .._recorded import is_in, layout, load_key, loads
from . import LOAD_FORMAT

_logger = logging.getLogger(__name__)

REFUSAL = (
    "the weights of this engine are the memory of a keeper, which is read-only; send device_ipc.sglang.named_tensors('keeper:{}') for its present "
    f"version, or tensors by device_ipc.sglang.share, with load_format={LOAD_FORMAT!r}"
)
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
_WEIGHTS = "weights"
"""SGLang's tag of the memory of weights."""


def install(model: Any) -> None:
    """Has SGLang pass updates of a model in place, and the release of its memory, to this module."""

    def refuse(_weights: Any) -> None:
        raise UnsupportedError(_refusal(model))

    # In case this release of SGLang loads weights otherwise.
    vars(model)["load_weights"] = refuse
    hooks: dict[str, Any] = {
        f"{_MANAGER}.SchedulerWeightUpdaterManager.release_memory_occupation": _release,
        f"{_MANAGER}.SchedulerWeightUpdaterManager.resume_memory_occupation": _resume,
    }
    for name in vars(importlib.import_module(_UPDATER).WeightUpdater):
        if name in ("begin_weight_update", "end_weight_update"):
            hooks[f"{_UPDATER}.WeightUpdater.{name}"] = _prepare
        elif name.startswith("update_weights_from_"):
            hooks[f"{_UPDATER}.WeightUpdater.{name}"] = _update_from_tensor if name.endswith("_tensor") else _update
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()


def update(model: Any, source: str) -> None:
    """Has a model in place take new weights: the present version of its keeper, if ``source`` names it, else tensors, which are published.

    All ranks of the engine take them, or none does.
    """
    in_place: InPlace = getattr(model, IN_PLACE)
    if in_place.is_suspended:
        raise UnsupportedError("the memory of the weights is released; resume it before an update")
    if not _is_joint(in_place):
        raise UnsupportedError("SGLang passes a request to a pipeline stage when the stage before has answered it, so no stages take a version together")
    with in_place.together() as ranks:
        if not in_place.is_named(source):
            ranks.ask({"ready": True})
            _publish(model, source, ranks)
        begin = time.perf_counter()
        in_place.take(ranks)
    _logger.info("device_ipc: the present version of %s in %.1f ms", in_place.address.name, (time.perf_counter() - begin) * 1000)


def _is_joint(in_place: InPlace) -> bool:
    """Returns whether all ranks answer a request at the same time."""
    return in_place.published.manifest.pipeline_parallel_size == 1


def _publish(model: Any, source: str, ranks: Any) -> None:
    """Loads tensors into other memory of the keeper, as the next version for all engines."""
    in_place: InPlace = getattr(model, IN_PLACE)
    device, begin = in_place.block.device, time.perf_counter()
    # Memory of the mock is memory of the CPU, which names no device.
    there = None if device.type == "cpu" else device
    with (
        dt.open(source, device=there, copy="staged-if-needed", allow_read_only=True) as weights,
        contextlib.closing(Update(model, device, ranks)) as version,
    ):
        how = _fill(model, version, list(weights.items()))
        version.publish()
    took = (time.perf_counter() - begin) * 1000
    _logger.info("device_ipc: the next version of %s was %s and published in %.1f ms", in_place.address.name, how, took)


def _fill(model: Any, version: Update, weights: list[tuple[str, torch.Tensor]]) -> str:
    """Copies weights to the memory of a version; returns in which way."""
    kept, found, load = getattr(model, IN_PLACE).block, loads(model), types.MethodType(_load, model)
    plan = found.plan(load_key(load, layout(weights)))
    if plan is not None:
        plan.onto(kept.data_ptr(), version.block).copy(0, [tensor for _, tensor in weights])
        return "replayed"
    address = version.block.data_ptr()
    version.lend()
    found(load, weights)
    version.take_back()
    if not found.move(address, kept):
        raise UnsupportedError(
            "the load of these weights is not recorded as copies alone (the log of the engine has the reason), so other engines cannot take it; "
            "send all weights at once, or restart the keeper and the engines for new weights"
        )
    return "loaded"


def _load(model: Any, weights: Any) -> None:
    """Loads weights as for an engine that starts."""
    refuse, device = vars(model).pop("load_weights"), next(model.parameters()).device
    try:
        restore = getattr(DefaultModelLoader, "restore_weights_before_loading", None)
        if restore is not None:
            restore(model, device)
        DefaultModelLoader.load_weights_and_postprocess(model, weights, device)
    finally:
        vars(model)["load_weights"] = refuse


def _refusal(model: Any) -> str:
    return REFUSAL.format(getattr(model, IN_PLACE).address.name)


def _update(update: Any, updater: Any, *arguments: Any, **options: Any) -> Any:
    """Answers an update as SGLang does: whether it was done, and the reason."""
    if hasattr(model := updater.get_model(), IN_PLACE):
        return False, f"UnsupportedError: {_refusal(model)}"
    return update(updater, *arguments, **options)


def _update_from_tensor(update: Any, updater: Any, named_tensors: Any, load_format: str | None = None) -> Any:
    """Answers an update by the loader of this package, whose exceptions would end the engine."""
    if load_format == LOAD_FORMAT and LOAD_FORMAT not in updater.custom_weight_loaders:
        # An engine in place needs no --custom-weight-loader, and nor does its draft model.
        updater.custom_weight_loaders.append(LOAD_FORMAT)
    if not hasattr(updater.get_model(), IN_PLACE):
        return update(updater, named_tensors, load_format)
    if load_format != LOAD_FORMAT:
        return _update(update, updater)
    try:
        return update(updater, named_tensors, load_format)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _prepare(prepare: Any, updater: Any, **options: Any) -> Any:
    """Leaves the parameters as they are before and after an update, which has SGLang process weights in other memory."""
    return None if hasattr(updater.get_model(), IN_PLACE) else prepare(updater, **options)


_released: weakref.WeakKeyDictionary[InPlace, list[tuple[torch.Tensor, torch.Tensor]]] = weakref.WeakKeyDictionary()
"""For each model whose weights are released, its own tensors that SGLang does not restore, with their contents."""


def _release(release: Any, manager: Any, request: Any) -> Any:
    """Releases the memory of the weights too, which keep their addresses."""
    model = manager.tp_worker.model_runner.model
    in_place: InPlace | None = getattr(model, IN_PLACE, None)
    if in_place is None or not _is_joint(in_place) or (request.tags and _WEIGHTS not in request.tags):
        return release(manager, request)
    block, buffers = in_place.block, dict(model.named_buffers())
    address = block.data_ptr()
    kept = {name for name, one in buffers.items() if is_in(one, address, block)}
    known, layouts = {id(one) for one in buffers.values()}, in_place.published.tensors
    others = [one.tensor for name, one in held(model, block.device).items() if name in layouts and not is_in(one.tensor, address, block)]
    own = [(one, one.detach().to("cpu", copy=True)) for one in others if id(one) not in known]
    answer = release(manager, request)
    # SGLang writes them when it resumes.
    state = manager.stashed_model_static_state
    state["buffers"] = [(name, one) for name, one in state["buffers"] if name not in kept]
    _released[in_place] = own
    in_place.suspend()
    return answer


def _resume(resume: Any, manager: Any, request: Any) -> Any:
    """Maps the present version of the weights again, for all ranks. An exception ends the engine: SGLang's answer has no error."""
    in_place: InPlace | None = getattr(manager.tp_worker.model_runner.model, IN_PLACE, None)
    if in_place is None or not in_place.is_suspended or (request.tags and _WEIGHTS not in request.tags):
        return resume(manager, request)
    begin = time.perf_counter()
    with in_place.together("wakes") as ranks:
        in_place.take(ranks)
    _logger.info("device_ipc: the weights of %s are mapped again after %.1f ms", in_place.address.name, (time.perf_counter() - begin) * 1000)
    answer = resume(manager, request)
    with torch.no_grad():
        for tensor, contents in _released.pop(in_place):
            tensor.copy_(contents)
    # What it has may be of a former version.
    manager.flush_cache()
    return answer

"""Models whose weights lie in the memory of another process. Importing this module imports neither torch nor transformers."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from . import _native
from . import torch as _tensors

__all__ = ["from_pretrained", "load"]

_lock = threading.Lock()


def from_pretrained(source: Any, config: Any, model_class: Any = None, *, device: Any = None, **options: Any) -> Any:
    """Returns a model of transformers whose weights are shared tensors, without a copy.

    ``source`` is a descriptor, the name of a keeper (``"keeper:llama"``), or what ``device_ipc.torch.open`` has returned.
    ``config`` is the model's configuration, ``model_class`` a class of models or an ``Auto`` class, by default
    ``AutoModelForCausalLM``; ``options`` are those of ``device_ipc.torch.open``. See ``load`` for the model.

    The model is not made by its own ``from_pretrained(None, config=config, state_dict=…)``: that moves the tensors to the host,
    or, with ``device_map``, allocates as much device memory as the weights have.
    """
    if model_class is None:
        from transformers import AutoModelForCausalLM

        model_class = AutoModelForCausalLM
    state = _open(source, device, options)
    config = copy.deepcopy(config)
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)
    if dtype is not None:
        # Buffers that the state does not have are made in the element type of the weights.
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    build = getattr(model_class, "from_config", model_class)
    with _default_dtype(dtype):
        return load(state, lambda: build(config))


def load(source: Any, build: Callable[[], Any], *, device: Any = None, **options: Any) -> Any:
    """Calls ``build``, and returns its module with shared tensors for parameters and persistent buffers, without a copy.

    - The parameters of ``build`` are not allocated. Other buffers, which a state dict does not have, are those of ``build``, moved
      to the device of the tensors.
    - A name that ``build`` ties to another one may be missing. Parameters keep the element types of the shared tensors.
    - The module is in evaluation mode and no parameter requires a gradient, because other processes use the same memory, which
      may be read-only. Its tensors keep the memory open.

    A parameter or a persistent buffer that ``source`` does not have is a ``KeyError``; names that the module does not have are a
    warning.
    """
    import torch

    state = _open(source, device, options)
    with _meta_parameters(torch):
        module = build()
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    module.requires_grad_(False)
    names = _names(module)
    result = module.load_state_dict(dict(state), strict=False, assign=True)
    loaded = dict(module.named_parameters(remove_duplicate=False))
    for tied in names.values():
        _tie(module, [(name, loaded[name]) for name in tied])
    missing = [name for name, one in module.named_parameters(remove_duplicate=False) if one.is_meta]
    buffers = dict(module.named_buffers(remove_duplicate=False))
    missing += [name for name in result.missing_keys if name in buffers]
    if missing:
        raise KeyError(
            f"{_some(missing)} of {type(module).__name__} not found in the shared tensors{_unused(result.unexpected_keys)}; share "
            "tensors under the names of the module's state_dict(), or build the module from the configuration of these tensors"
        )
    if result.unexpected_keys:
        warnings.warn(f"{type(module).__name__} does not use {_some(result.unexpected_keys)} of the shared tensors", stacklevel=2)
    _move_buffers(module, set(state), next((tensor.device for tensor in state.values()), None))
    return module.eval()


def _open(source: Any, device: Any, options: dict[str, Any]) -> Any:
    if isinstance(source, collections.abc.Mapping) and not isinstance(source, _native.Mapping):
        return source
    return _tensors.open(source, device=device, **{"allow_read_only": True, **options})


@contextlib.contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    """Makes tensors without a stated element type have this one."""
    import torch

    before = torch.get_default_dtype()
    if dtype is not None and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _meta_parameters(torch: Any) -> Iterator[None]:
    """Gives the modules that this thread builds parameters without memory."""
    module, thread = torch.nn.Module, threading.get_ident()
    # One thread at a time: each restores the method that it has found.
    with _lock:
        register = module.register_parameter

        def register_parameter(self: Any, name: str, param: Any) -> None:
            if param is not None and not param.is_meta and threading.get_ident() == thread:
                param = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            register(self, name, param)

        module.register_parameter = register_parameter
        try:
            yield
        finally:
            module.register_parameter = register


def _names(module: Any) -> dict[int, list[str]]:
    """Returns the names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _tie(module: Any, tied: list[tuple[str, Any]]) -> None:
    """Makes one parameter of those that were tied: those that were not loaded, and those loaded from the same memory."""
    first = next((one for _name, one in tied if not one.is_meta), None)
    for name, parameter in tied:
        if first is not None and (parameter.is_meta or parameter.data_ptr() == first.data_ptr()):
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, first)


def _move_buffers(module: Any, loaded: set[str], device: Any) -> None:
    """Moves the buffers that were not loaded."""
    for prefix, one in module.named_modules():
        for name, buffer in one._buffers.items():
            if buffer is not None and f"{prefix}.{name}".lstrip(".") not in loaded:
                one._buffers[name] = buffer.to(device)


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:5])
    return listed if len(names) <= 5 else f"{listed} and {len(names) - 5} more"


def _unused(names: list[str]) -> str:
    return f" (which have {_some(names)} instead)" if names else ""

"""Weights for SGLang: from a trainer, through ``Engine.update_weights_from_tensor``, and from a keeper to an engine that starts.

SGLang finds the load format ``device_ipc`` by this package's entry point. Importing this module imports neither torch nor sglang.

The payload of an update is the text of a descriptor, as the bytes of a CPU tensor. SGLang passes it to ``load_weights`` in each
worker, which opens the trainer's tensors and gives them to the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import _native
from .. import torch as _tensors
from .._errors import DescriptorError
from .._manifest import IN_PLACE
from .._weight_keeper import WeightKeeper

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LOAD_FORMAT", "Update", "WeightKeeper", "load_weights", "named_tensors", "register", "share"]

LOAD_FORMAT = "device_ipc.sglang.load_weights"
"""The argument of ``--custom-weight-loader``, and the ``load_format`` of an update."""

_NAME = "device_ipc"
"""The name of the load format of an engine."""


class Update:
    """Tensors that are shared for one update of the weights; see ``share``."""

    def __init__(self, exports: Sequence[_native.Export], timeout: float | None) -> None:
        self._exports = exports
        self._timeout = timeout
        self.named_tensors = named_tensors(*(export.descriptor for export in exports))
        """The argument of ``Engine.update_weights_from_tensor``, which is the same for all workers."""

    @property
    def exports(self) -> Sequence[_native.Export]:
        """The exports, one for all workers or one for each."""
        return self._exports

    def close(self, timeout: float | None = None) -> None:
        """Waits until the workers have released the tensors, and ends the exports.

        Raises ``StillHeldError``, which names the workers, on timeout. A worker that has not opened the tensors by then gets
        ``StaleError``, so close an update only after the engine has answered.
        """
        for export in self._exports:
            export.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_exception: object) -> None:
        if kind is None:
            self.close(self._timeout)
        else:
            # Ends the exports as soon as the workers have released them, without a wait.
            self._exports = ()


def share(
    *tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    access: Any = "rw",
    ready: Any = None,
    allow_users: Sequence[int] = (),
    timeout: float | None = 60.0,
) -> Update:
    """Shares tensors for one update of the weights.

    Pass one state dict (a mapping, or pairs of names and tensors) for all workers, or one for each tensor-parallel rank, in the
    order of the ranks. At the end of the ``with`` block the exports end, after ``timeout`` seconds at most of waiting for workers::

        with device_ipc.sglang.share(model.state_dict()) as update:
            engine.update_weights_from_tensor(update.named_tensors, load_format=device_ipc.sglang.LOAD_FORMAT)
    """
    exports = [
        _native.share(dict(one), access=access, ready=ready, allow_users=allow_users) for one in tensors
    ]
    return Update(exports, timeout)


def named_tensors(*descriptors: _native.Descriptor | str) -> list[tuple[str, Any]]:
    """Returns the argument of ``Engine.update_weights_from_tensor`` for descriptors, or for the name of a keeper.

    Pass one descriptor for all workers, or one for each tensor-parallel rank. The tensors are pickled by value, so that a payload
    can be sent over HTTP, read repeatedly, or dropped unread.
    """
    if not descriptors:
        raise ValueError("no descriptor: pass one for all workers, or one for each tensor-parallel rank")
    import torch

    class Text(torch.Tensor):
        """A CPU tensor that is pickled as a call of ``torch.ByteTensor`` with its values.

        ``torch.multiprocessing`` would pickle a file descriptor, which only a process of the same parent can receive, and once.
        """

        def __reduce_ex__(self, _protocol: Any) -> Any:
            return torch.ByteTensor, (self.tolist(),)

    pairs = []
    for rank, descriptor in enumerate(descriptors):
        text = torch.frombuffer(bytearray(str(descriptor).encode()), dtype=torch.uint8)
        pairs.append((f"device_ipc.{rank}", text.as_subclass(Text)))
    return pairs


def load_weights(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Opens the tensors that an update names, and loads them: the function that ``--custom-weight-loader`` names.

    The tensors are opened on this worker's device, by a copy through the host where the devices have no peer access. They are
    released when the work that ``model.load_weights`` has submitted to the current stream has finished. A load that is only copies is recorded, and
    later ones of equal tensors are copied by that record, without ``model.load_weights``; the log says why a load is none.

    A model in place takes the present version of its keeper, if the update names it. Else it publishes the tensors as the next version, and
    takes that.
    """
    from .._in_place import MODELS
    from .._recorded import loads

    pairs = list(named_tensors)
    if not pairs:
        raise DescriptorError("the update has no tensor with a descriptor; make it by device_ipc.sglang.named_tensors")
    _name, tensor = pairs[0 if len(pairs) == 1 else _rank(len(pairs))]
    # SGLang has moved the tensor to the worker's device. Memory of the mock arrives as memory of the CPU, which names no device.
    device = None if tensor.device.type == "cpu" else tensor.device
    source = _text(tensor)
    if hasattr(model, IN_PLACE):
        from ._updates import update

        update(model, source)
        return
    if any(target.is_named(source) for target in MODELS):
        # A draft model, whose weights the keeper of the target does not have.
        return
    with _tensors.open(source, device=device, copy="staged-if-needed", allow_read_only=True) as weights:
        loads(model)(model.load_weights, list(weights.items()))


def register() -> None:
    """Adds the load format ``device_ipc`` to the installed SGLang.

    SGLang calls it in each of its processes, by the entry point group ``sglang.srt.plugins``. Calling it again changes nothing.
    """
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _NAME not in server_args.LOAD_FORMAT_CHOICES:
        server_args.add_load_format_choices([_NAME])
        HookRegistry.register("sglang.srt.configs.load_config.LoadConfig._verify_load_format", _verify_load_format, HookType.AROUND)


def _verify_load_format(verify: Any, config: Any) -> None:
    """Has SGLang make a loader of this package for its name: a load format may be a class of loaders."""
    if config.load_format != _NAME:
        verify(config)
    elif config.tp_rank is None:
        # Not of an engine that starts, but of an update from files, for which SGLang passes on the format of the engine.
        config.load_format = "auto"
        verify(config)
    else:
        from ._loader import ModelLoader

        config.load_format = ModelLoader


def _text(tensor: Any) -> str:
    """Returns the descriptor that the bytes of a tensor are."""
    if str(tensor.dtype) != "torch.uint8" or tensor.dim() != 1:
        raise DescriptorError(
            f"expected the bytes of a descriptor, found a tensor of {tensor.dtype} with shape {list(tensor.shape)}; make the "
            f'update by device_ipc.sglang.named_tensors, or send tensors without load_format="{LOAD_FORMAT}"'
        )
    try:
        return bytes(tensor.cpu().tolist()).decode()
    except UnicodeDecodeError:
        raise DescriptorError("the bytes of the update are not a descriptor: they are not UTF-8") from None


def _rank(count: int) -> int:
    """Returns the tensor-parallel rank of this worker."""
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    rank = int(get_tensor_model_parallel_rank())
    if rank >= count:
        raise ValueError(
            f"the update has descriptors for {count} tensor-parallel ranks, and this worker has rank {rank}; share one state dict "
            "for each rank, or one for all"
        )
    return rank

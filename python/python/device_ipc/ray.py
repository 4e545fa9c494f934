"""A tensor transport for Ray (Ray Direct Transport): actors of one node read each other's tensors in place.

The transport is one-sided. The actor that creates an object shares all of its tensors as one export, and Ray carries the text of
the export's descriptor. An actor that receives the object opens the memory. Importing this module imports Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

import ray as _ray  # the framework: imports are absolute
import ray.experimental as _experimental

from . import _backends, _native
from . import torch as _tensors
from ._errors import Error, GoneError, PlacementError, UnsupportedError

if not hasattr(_experimental, "register_tensor_transport"):
    raise ImportError(f"Ray {_ray.__version__} has no tensor transports of other packages; install Ray 2.54 or later")

if TYPE_CHECKING:
    # Ray's types are not part of the type check.
    class _Manager: ...

    class _Metadata: ...

else:
    _Manager, _Metadata = _experimental.TensorTransportManager, _experimental.TensorTransportMetadata

__all__ = ["DeviceIpcTransport", "Metadata", "receive_options", "register"]

_register: Any = _experimental.register_tensor_transport
# 2.55 added the argument, and made the device of the metadata a text.
_HAS_DATA_TYPE = "data_type" in inspect.signature(_register).parameters


@dataclasses.dataclass
class Metadata(_Metadata):
    """What Ray carries from the actor that created an object to the actors that receive it."""

    # The fields of Ray's class, for type checkers.
    tensor_meta: list[Any]
    tensor_device: Any = None
    descriptor: str | None = None
    """The text of the descriptor of all tensors, whose names are their positions; None for an object without tensors."""
    node: str | None = None
    """Ray's identity of the node of the tensors."""


@dataclasses.dataclass(frozen=True)
class _Options:
    device: Any = None
    copy: Any = "never"
    timeout: float = 30.0


_options = _Options()


def register(name: str = "device_ipc") -> None:
    """Registers the transport with Ray: ``@ray.method(tensor_transport="device_ipc")``.

    Call it before the actors are created, in the process that creates them. Ray registers the transport in the actors, where this
    package has to be installed. Calling it again has no effect.
    """
    import torch

    arguments: dict[str, Any] = {"data_type": torch.Tensor} if _HAS_DATA_TYPE else {}
    try:
        _register(name, _backends.kinds(), DeviceIpcTransport, **arguments)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def receive_options(*, device: Any = None, copy: Any = "never", timeout: float = 30.0) -> None:
    """Sets where and how this process opens the tensors that it receives from now on. Call it in the receiving actor.

    ``device`` is a device, such as "cuda:1", or a map from identities of home devices, as for ``device_ipc.open``. Without it,
    tensors are opened on their home device if this process sees it, and on PyTorch's current device otherwise. ``copy`` is
    the condition of a copy, as for ``device_ipc.open``: ``"staged-if-needed"`` copies the tensors through the host where that device
    cannot reach them. ``timeout`` limits the open, and the wait for the work
    that writes the tensors, in seconds.
    """
    global _options
    _options = _Options(device, copy, timeout)


class DeviceIpcTransport(_Manager):
    """The transport. Ray creates one in each process."""

    def __init__(self) -> None:
        self._exports: dict[str, tuple[_native.Export | None, Metadata]] = {}
        # The objects that are being received, and whether Ray has aborted the transfer.
        self._aborted: dict[str, bool] = {}
        self._lock = threading.Lock()

    def tensor_transport_backend(self) -> str:
        return "DEVICE_IPC"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    # Ray passes the arguments by position. 2.54 has other names for some of them, and neither target_buffers nor, of
    # garbage_collect, tensors.

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Metadata:
        """Shares the tensors. Readers wait for the work that was submitted to the current stream before."""
        known = self._exports.get(obj_id)
        if known is not None:
            # Ray has run the task again, and kept the first result.
            return known[1]
        made = _share(rdt_object)
        self._exports[obj_id] = made
        return made[1]

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return _experimental.CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Metadata,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Opens the tensors, or copies them into the buffers. They are ready for every stream when it returns."""
        with self._receiving(obj_id):
            tensors = _open(tensor_transport_metadata)
        if target_buffers is None:
            return tensors
        return [buffer.copy_(tensor) for buffer, tensor in zip(target_buffers, tensors, strict=True)]

    @contextlib.contextmanager
    def _receiving(self, obj_id: str) -> Any:
        with self._lock:
            self._aborted[obj_id] = False
        try:
            yield
        finally:
            with self._lock:
                aborted = self._aborted.pop(obj_id, False)
        if aborted:
            raise GoneError(f"Ray has aborted the transfer of the object {obj_id}")

    def send_multiple_tensors(self, tensors: list[Any], tensor_transport_metadata: Metadata, communicator_metadata: Any) -> None:
        raise NotImplementedError("the transport is one-sided: receivers open the memory, and nothing is sent")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Metadata, tensors: list[Any] | None = None) -> None:
        """Ends the export, without waiting: the memory stays as long as a process has it open, or until that process dies."""
        self._exports.pop(obj_id, None)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Has a transfer that is in progress in this process fail. Its open ends by itself, at the latest after its timeout."""
        with self._lock:
            if obj_id in self._aborted:
                self._aborted[obj_id] = True


def _share(tensors: list[Any]) -> tuple[_native.Export | None, Metadata]:
    if not tensors:
        return None, Metadata([])
    device = tensors[0].device
    kinds = sorted({tensor.device.type for tensor in tensors})
    if len(kinds) > 1:
        raise ValueError(f"the object has tensors on {' and '.join(kinds)}; Ray transfers one kind of devices at a time")
    try:
        export = _native.share({str(position): tensor for position, tensor in enumerate(tensors)})
    except Error as error:
        if device.type != "cpu":
            raise
        raise UnsupportedError(
            f"CPU tensors can be shared if they are memory of the mock ({error}); move the tensors to a device, or use another "
            "tensor_transport"
        ) from error
    meta = [(tensor.shape, tensor.dtype) for tensor in tensors]
    return export, Metadata(meta, device.type if _HAS_DATA_TYPE else device, str(export), _node())


def _open(metadata: Metadata) -> list[Any]:
    if metadata.descriptor is None:
        return []
    options = _options
    try:
        descriptor = _native.Descriptor(metadata.descriptor)
        device = options.device if options.device is not None else _device_here(descriptor)
        if device is not None and not isinstance(device, dict):
            # A map, with which the host waits for the tensors: Ray receives on a thread whose streams are not the user's.
            device = {home: device for home in descriptor.homes}
        tensors = _tensors.open(descriptor, device=device, copy=options.copy, timeout=options.timeout)
    except Error as error:
        here = _node()
        if metadata.node == here:
            raise
        raise PlacementError(
            f"the tensors are on the node {metadata.node} and this process is on the node {here}: device_ipc transfers between "
            f"processes of one node. Place the actors on one node, or use another tensor_transport ({error})"
        ) from error
    return [tensors[str(position)] for position in range(len(metadata.tensor_meta))]


def _device_here(descriptor: _native.Descriptor) -> str | None:
    """Returns the device to open the tensors on if this process does not see their home device."""
    if all(home in _visible() for home in descriptor.homes):
        return None
    if len(descriptor.homes) > 1:
        raise PlacementError(
            "the object has tensors of several devices that this process does not all see: return the tensors of each device as an "
            "object, or map the devices with device_ipc.ray.receive_options(device={...})"
        )
    kind = _backends.kind(descriptor.backend)
    if kind == "cpu":
        return f"{descriptor.backend}:0"
    import torch

    return f"{kind}:{getattr(torch, kind).current_device()}"


@functools.cache
def _visible() -> frozenset[str]:
    return frozenset(device.uuid for device in _native.devices())


def _node() -> str:
    """Returns Ray's identity of this node."""
    return str(_ray.get_runtime_context().get_node_id())

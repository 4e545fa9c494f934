"""The backend ``device_ipc`` of verl's checkpoint engine, which passes the weights of the trainer to the rollouts of one machine.

Its import registers it: name this module as verl's ``checkpoint_engine.custom_backend_module``.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.checkpoint_engine.base import CheckpointEngineRegistry

from . import _native, verl as _verl

if TYPE_CHECKING:
    # verl's types are not part of the type check.
    class _Base: ...

else:
    from verl.checkpoint_engine.base import CheckpointEngine as _Base

__all__ = ["CheckpointEngine"]

_register: Any = CheckpointEngineRegistry.register


class Metadata(NamedTuple):
    """What a worker tells before an update."""

    host: str
    """The identity of the machine since its start."""
    name: str | None
    """The name by which the workers connect to the one that sends."""


@_register("device_ipc")
class CheckpointEngine(_Base):
    """Sends buckets of ``bucket_size`` bytes from the trainer's rank 0 through a ring, which all rollouts read.

    ``is_master`` is set by verl, for rank 0 of the trainer. ``device`` is that of the buckets or of the received tensors, by default
    the one of the weights, or PyTorch's current one.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, device: Any = None) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.device = device
        self._name: str | None = None
        self._receivers = 0
        self._listener: _native.Listener | None = None

    def prepare(self) -> Metadata:
        self.finalize()
        if self.is_master:
            self._name = f"verl-{uuid.uuid4().hex}"
            # The rollouts connect while it waits for the others.
            self._listener = _native.listen(self._name)
        return Metadata(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), self._name)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Metadata]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        sender, rollouts = metadata[0], metadata[actor_wg_world_size:]
        if sender.name is None:
            raise ValueError("the first worker of the trainer was not made with is_master=True")
        for rank, rollout in enumerate(rollouts):
            if rollout.host != sender.host:
                raise ValueError(
                    f"rollout worker {rank} is on another machine than the trainer's rank 0, and device_ipc shares memory of one "
                    "machine; place them together, or use the backend nccl, hccl or nixl"
                )
        return (
            {"name": [None] * actor_wg_world_size, "receivers": [rollout_world_size] * actor_wg_world_size},
            {"name": [sender.name] * rollout_world_size, "receivers": [rollout_world_size] * rollout_world_size},
        )

    def init_process_group(self, name: str | None, receivers: int) -> None:
        self._receivers = receivers
        if not self.is_master:
            self._name = name

    def finalize(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self._name = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Sends pairs of names and tensors. Ranks other than 0 only make them, which is a collective of the trainer's ranks."""
        if not self.is_master:
            async for _pair in _verl.iterate(weights):
                pass
            return
        assert self._listener is not None, "verl calls prepare before"
        channels = [self._listener.accept(timeout=_verl.TIMEOUT) for _ in range(self._receivers)]
        await _verl.send(weights, channels, self.bucket_size, self.device)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yields pairs of names and tensors, each of which is valid until the next one is asked for."""
        assert self._name is not None, "verl calls init_process_group before"
        with _native.connect(self._name, timeout=_verl.TIMEOUT) as channel:
            for weights, _is_last in _verl.received(channel, self.device or _current_device()):
                for pair in weights:
                    yield pair


def _current_device() -> Any:
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())

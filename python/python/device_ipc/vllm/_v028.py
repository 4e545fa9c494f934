"""vLLM 0.28 to 0.32: the trainer has an engine, and its source is iterated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.weight_transfer import base

from ._sender import Layout
from ._trainer import Trainer
from ._worker import InitInfo, UpdateInfo, Worker

if TYPE_CHECKING:
    from typing_extensions import Self


class WorkerEngine(Worker, base.WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The backend ``device_ipc`` of a worker."""


@dataclass
class TrainerInitInfo(base.TrainerInitInfo):  # type: ignore[misc]
    """The options of the trainer, which are those of ``WeightSender``; ``rank`` 0 sends."""

    backend: ClassVar[str] = "device_ipc"
    bucket_bytes: int = 0
    slots: int = 2
    timeout: float = 300.0
    copy: str = "never"
    keep_export: bool = False


class TrainerEngine(Trainer, base.TrainerWeightTransferEngine[TrainerInitInfo]):  # type: ignore[misc]
    """The backend ``device_ipc`` of a trainer."""

    init_info_cls = TrainerInitInfo

    @classmethod
    def _make(cls, init_info: TrainerInitInfo, client: Any, source: Any) -> Self:
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def _weights(self) -> Iterator[tuple[str, Any]]:
        return iter(self.source)

    def _layout(self) -> list[Layout]:
        return [Layout.of(meta.name, meta) for meta in self.source.metadata()]

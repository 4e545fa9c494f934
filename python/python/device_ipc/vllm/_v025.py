"""vLLM 0.25 to 0.27: the worker's engine also has the trainer's side, as a static method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from ._sender import WeightSender
from ._worker import InitInfo, UpdateInfo, Worker


class WorkerEngine(Worker, WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The backend ``device_ipc`` of a worker."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Any]], trainer_args: dict[str, Any]) -> None:
        """Sends weights as one export. ``trainer_args`` are those of ``WeightSender``: ``{"client": client}`` suffices."""
        WeightSender(**trainer_args).send(iterator)

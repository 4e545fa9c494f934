"""vLLM 0.33: sources know which rank owns a parameter, and have two modes of iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _v028
from ._sender import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

WorkerEngine = _v028.WorkerEngine
TrainerInitInfo = _v028.TrainerInitInfo


class TrainerEngine(_v028.TrainerEngine):
    """The backend ``device_ipc`` of a trainer."""

    @classmethod
    def _make(cls, init_info: TrainerInitInfo, client: Any, source: Any) -> Self:
        if not source.implements_iter_full():
            raise TypeError(f"{type(source).__name__} does not implement iter_full(), and device_ipc sends full tensors")
        if len(source.owned_names(init_info.rank)) != len(source.metadata):
            raise ValueError(f"rank {init_info.rank} does not own every parameter, and device_ipc sends all from rank 0")
        return cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)

    def _weights(self) -> Iterator[tuple[str, Any]]:
        weights: Iterator[tuple[str, Any]] = self.source.iter_full()
        return weights

    def _layout(self) -> list[Layout]:
        return [Layout.of(meta.name, meta) for meta in self.source.metadata]

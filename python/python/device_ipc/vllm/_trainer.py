"""The trainer's engine, for the base classes of all versions of vLLM that have one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._sender import Layout, WeightSender

if TYPE_CHECKING:
    from typing_extensions import Self


class Trainer:
    """The methods of vLLM's ``TrainerWeightTransferEngine`` that this backend implements."""

    # Of the base class.
    source: Any
    is_sender: bool

    _sender: WeightSender

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        """Returns an engine, when the workers have replied that they can receive."""
        if source is None:
            raise ValueError("the device_ipc backend needs a WeightSource; pass source=ModuleSource(model)")
        engine = cls._make(init_info, client, source)
        options = {name: getattr(init_info, name) for name in ("bucket_bytes", "slots", "timeout", "copy", "keep_export")}
        engine._sender = WeightSender(client, **options)
        if engine.is_sender:
            engine._sender.connect()
        return engine

    def send_weights(self) -> None:
        """Sends the weights of the source. Ranks other than 0 only take part in its collectives."""
        if self.is_sender:
            self._sender.send(self._weights(), self._layout())
        else:
            for _ in self._weights():
                pass

    def shutdown(self) -> None:
        """Frees the buckets, and ends an export that was kept."""
        self._sender.close()

    @classmethod
    def _make(cls, init_info: Any, client: Any, source: Any) -> Self:
        raise NotImplementedError

    def _weights(self) -> Iterator[tuple[str, Any]]:
        raise NotImplementedError

    def _layout(self) -> list[Layout]:
        raise NotImplementedError

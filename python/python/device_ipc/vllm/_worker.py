"""The worker's side of an update, for the base classes of all versions of vLLM."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from dataclasses import dataclass
from typing import Any

from .. import _native
from .. import torch as dt
from .._errors import GoneError, LayoutError, UnsupportedError
from .._manifest import IN_PLACE
from .._recorded import Plan, RecordedLoad, Recording, layout, load_key, recorded

_logger = logging.getLogger(__name__)


@dataclass
class InitInfo:
    """What the trainer sends before the first update, and when it makes new buckets."""

    ring: str | None = None
    """The ring of the buckets; None where the weights are one export."""
    timeout: float = 300.0
    """The limit of each wait, in seconds."""
    copy: str = "never"
    """As for ``device_ipc.open``: ``"staged-if-needed"`` copies an export through the host where this device cannot reach it."""

    def __post_init__(self) -> None:
        if self.ring is not None and not _native.Descriptor(self.ring).is_ring:
            raise ValueError("init_info['ring'] is not the descriptor of a ring; pass str(ring)")


@dataclass
class UpdateInfo:
    """One update, as plain JSON: the descriptor of an export, or the contents of the buckets of the ring."""

    weights: str | None = None
    buckets: list[list[list[Any]]] | None = None
    """For each bucket its tensors, as ``[name, dtype, shape, offset in bytes]``."""
    follow: bool = False
    """Whether an engine whose weights are in place takes the version that another update has published."""

    def __post_init__(self) -> None:
        if (self.weights is not None) + (self.buckets is not None) + self.follow != 1:
            raise ValueError("update_info must have either 'weights', the descriptor of an export, or 'buckets', or 'follow'")
        if self.weights is not None and _native.Descriptor(self.weights).is_ring:
            raise ValueError("update_info['weights'] is the descriptor of a ring; pass that of an export, str(export)")


class Worker:
    """The methods of vLLM's ``WeightTransferEngine`` that this backend implements."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    # Of the base class.
    device: Any
    model: Any
    model_config: Any

    _init = InitInfo()
    _reader: _native.RingReader | None = None
    _mappings: tuple[dt.Tensors, ...] = ()
    _loads: RecordedLoad | None = None
    _recording: Recording | None = None
    _ranks: Any = None
    """The connection that ends an update of weights in place for all ranks when it ends for one."""
    _update: Any = None
    """The next version of weights in place."""
    _address = 0
    """Of the memory in which the load of weights in place was recorded."""
    _loading = False
    """Whether vLLM has prepared the layers for this update. A load that is replayed needs no preparation."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Takes the trainer's ring, which the next update joins."""
        self._leave()
        self._init = init_info

    def start_weight_update(self) -> None:
        """Joins the ring, and the other ranks of an engine whose weights are in place."""
        self._close_mappings()
        self._close_update()
        in_place = getattr(self.model, IN_PLACE, None)
        if in_place is not None:
            if in_place.is_suspended:
                raise UnsupportedError("the engine sleeps; wake it before an update, which its weights take part in")
            self._ranks = in_place.together()
        if self._init.ring is not None and self._reader is None:
            # Before the trainer publishes: a reader receives what is published after it has joined.
            self._reader = _native.join(self._init.ring, device=self.device, timeout=self._init.timeout)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the weights of one update."""
        try:
            if update_info.follow:
                self._follow()
            elif update_info.weights is not None:
                self._load_export(update_info.weights)
            else:
                assert update_info.buckets is not None
                self._load_buckets(update_info.buckets)
        except BaseException as error:
            self._tell_ranks(error)
            self._abandon()
            raise

    def finish_weight_update(self) -> None:
        """Lets vLLM finish the load, and releases the trainer's memory.

        Waits until the device has read the memory: the trainer may write it as soon as it has the reply.
        """
        import torch

        try:
            if self._loading:
                self._loading = False
                with recorded(self._recording):
                    _reload().finalize_layerwise_reload(self.model, self.model_config)
                if self._loads is not None:
                    self._loads.finish()
            if self._update is not None:
                self._publish(self._update)
            if self._mappings and torch.accelerator.is_available():
                torch.accelerator.current_stream().synchronize()
        except BaseException as error:
            self._tell_ranks(error)
            self._loads = None
            raise
        finally:
            self._recording = None
            self._close_update()
            self._close_mappings()

    def _follow(self) -> None:
        in_place = getattr(self.model, IN_PLACE, None)
        if in_place is None:
            raise UnsupportedError("the weights of this engine are its own; start it with in_place to follow a keeper")
        in_place.take(self._ranks)

    def _publish(self, update: Any) -> None:
        """Publishes an update of weights in place, if it was only copies: what else a load makes of weights is in each engine."""
        assert self._loads is not None
        update.take_back()
        kept = getattr(self.model, IN_PLACE).block
        address, self._address = self._address, kept.data_ptr()
        if not self._loads.move(address, kept):
            raise UnsupportedError(
                "the load of these weights is not recorded as copies alone (the log has the reason), so other engines cannot take it; "
                "restart the keeper and the engines for new weights"
            )
        update.publish()

    def _tell_ranks(self, error: BaseException) -> None:
        if self._ranks is not None:
            self._ranks.fail(error)

    def _close_update(self) -> None:
        update, self._update = self._update, None
        ranks, self._ranks = self._ranks, None
        if update is not None:
            update.close()
        if ranks is not None:
            ranks.close()

    def shutdown(self) -> None:
        """Releases the trainer's memory, leaves its ring, and forgets the recorded load."""
        self._leave()
        self._loads = self._recording = None

    def _leave(self) -> None:
        self._close_update()
        self._close_mappings()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _abandon(self) -> None:
        """Ends an update that has failed: vLLM does not finish it, and would complete its layers with weights of the next."""
        loading, self._loading = self._loading, False
        try:
            if not loading:
                return
            info = _reload("layerwise").get_layerwise_info
            for layer in (info(module) for module in self.model.modules()):
                if layer.can_load():
                    # A layer without new weights gets back its former ones.
                    layer.loaded_weights.clear()
                    layer.load_numel = 0
            _reload().finalize_layerwise_reload(self.model, self.model_config)
        except Exception:
            _logger.exception("device_ipc: vLLM cannot restore the layers of an update that has failed; restart the engine")
        finally:
            # The trainer waits for no worker that has left the ring.
            self.shutdown()

    def _load_export(self, text: str) -> None:
        # The load only reads. vLLM keeps tensors of layers that are not complete until the end of the update.
        init = self._init
        state = dt.open(text, device=self.device, copy=init.copy, timeout=init.timeout, allow_read_only=True)
        self._mappings = (*self._mappings, state)
        pairs = list(state.items())
        tensors = [tensor for _, tensor in pairs]
        plan = self._prepare(layout(pairs))
        if plan is not None:
            plan.copy(0, tensors)
        else:
            self._load(pairs, tensors)

    def _load_buckets(self, buckets: list[list[list[Any]]]) -> None:
        import torch

        if self._reader is None:
            raise LayoutError("update_info has buckets, but init_info named no ring; send init_info with the trainer's ring first")
        plan = self._prepare(buckets)
        for number, bucket in enumerate(buckets):
            slot = self._reader.next(timeout=self._init.timeout)
            if slot is None:
                raise GoneError(f"the trainer closed the ring after {number} of {len(buckets)} buckets")
            with slot:
                used = max((offset + _nbytes(dtype, shape) for _, dtype, shape, offset in bucket), default=0)
                memory = torch.from_dlpack(slot)  # type: ignore[attr-defined]
                if memory.numel() < used:
                    raise LayoutError(f"bucket {number} needs {used} B, but a slot of the ring has {memory.numel()} B")
                if plan is not None:
                    plan.copy(number, [memory])
                else:
                    # A copy: vLLM keeps tensors of layers that are not complete, and the trainer writes the slot again.
                    copy = memory[:used].clone()
                del memory
            if plan is None:
                self._load([(name, _view(copy, dtype, shape, offset)) for name, dtype, shape, offset in bucket], [copy])

    def _prepare(self, payload: Any) -> Plan | None:
        """Returns the plan of an update whose load was recorded; else lets vLLM load weights in the format of the checkpoint."""
        if self._loads is None or self._loads.module is not self.model:
            self._loads = RecordedLoad(self.model)
        if self._loading:
            # Several payloads in one update: no plan has all of them.
            self._loads.forget()
            self._recording = None
            return None
        key = load_key(self.model.load_weights, self.device, payload)
        plan = self._loads.plan(key)
        if hasattr(self.model, IN_PLACE):
            from .._in_place import Update

            if self._update is not None:
                raise UnsupportedError("an update of weights in place is one payload; send all weights at once")
            self._update = Update(self.model, self.device, self._ranks)
            if plan is not None:
                return plan.onto(self._address, self._update.block)
            self._address = self._update.block.data_ptr()
            self._update.lend()
        if plan is None:
            self._recording = self._loads.record(key)
            self._loading = True
            _reload().initialize_layerwise_reload(self.model)
        return plan

    def _load(self, weights: list[tuple[str, Any]], tensors: list[Any]) -> None:
        """Loads weights, which are in the memory of ``tensors``."""
        with _incomplete(), recorded(self._recording, tensors):
            self.model.load_weights(weights)

    def _close_mappings(self) -> None:
        mappings, self._mappings = self._mappings, ()
        for mapping in mappings:
            mapping.close()


def _reload(module: str = "") -> Any:
    return importlib.import_module(f"vllm.model_executor.model_loader.reload{module and '.'}{module}")


def _incomplete() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a load may lack weights, as that of a bucket does. vLLM before 0.27 needs none."""
    try:
        validation = importlib.import_module("vllm.model_executor.model_loader.mtp_validation")
    except ModuleNotFoundError:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = validation.disable_mtp_completeness_check()
    return context


def _nbytes(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * int(dt._dtype(dt._torch(), dtype).itemsize)


def _view(memory: Any, dtype: str, shape: list[int], offset: int) -> Any:
    """Returns the tensor that begins at an offset in bytes."""
    end = offset + _nbytes(dtype, shape)
    return memory[offset:end].view(dt._dtype(dt._torch(), dtype)).view(shape)

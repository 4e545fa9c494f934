"""The trainer's side, which needs no vllm in its process: weights as one export, or in buckets through a ring."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from .. import _native
from .._errors import GoneError, LayoutError, TimeoutError

ALIGNMENT = 256
"""Tensors begin at multiples of this number of bytes in a bucket."""

SLOT_ALIGNMENT = 2 << 20
"""Slots that begin at multiples of it are copied fastest."""


REQUEST_INTERVAL = 0.5
"""The wait for a slot looks after this number of seconds whether the workers have replied."""


class Layout(NamedTuple):
    """A tensor that will be sent: ``dtype`` is a name such as ``"bfloat16"``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Any) -> Layout:
        """Returns the layout of a tensor, or of its metadata."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        import torch

        dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * int(dtype.itemsize)


class WeightSender:
    """Sends the weights of a trainer to vLLM, on which ``--weight-transfer-config '{"backend": "device_ipc"}'`` was set.

    ``client`` is a ``device_ipc.vllm.HTTPClient``, one of the clients of vLLM 0.28 or later (``HTTPVLLMWeightSyncClient``,
    ``RayVLLMWeightSyncClient``), or any object with their methods ``init_weight_transfer_engine(init_info)``,
    ``start_weight_update()``, ``update_weights(update_info)`` and ``finish_weight_update()``.

    Without ``bucket_bytes``, all weights are one export: nothing is copied in the trainer. It ends with the update; with
    ``keep_export=True`` it is used again, so that the workers open the memory once, as long as the tensors of an update are where those
    of the one before were. The sender then keeps their memory until ``close``, or until other tensors are sent.

    With ``bucket_bytes``, the weights are copied into the ``slots`` buckets of a ring, each of ``bucket_bytes`` or of what the largest
    tensor needs where that is more.

    ``timeout`` limits each wait, in seconds. ``copy="staged-if-needed"`` lets workers without peer access to the trainer's
    device copy an export through the host; buckets need peer access.

    Raises ``ValueError`` for options that contradict each other.
    """

    def __init__(
        self,
        client: Any,
        *,
        bucket_bytes: int = 0,
        slots: int = 2,
        timeout: float = 300.0,
        copy: str = "never",
        keep_export: bool = False,
    ) -> None:
        if bucket_bytes < 0 or slots < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes} and slots is {slots}; bucket_bytes must be 0 or more, slots 1 or more")
        if bucket_bytes and copy != "never":
            raise ValueError("buckets cannot be copied through the host; pass bucket_bytes=0 or copy='never'")
        if bucket_bytes and keep_export:
            raise ValueError("buckets are allocated once in any case; pass bucket_bytes=0 or keep_export=False")
        self._client = client
        self._bucket_bytes = bucket_bytes
        self._slots = slots
        self._timeout = timeout
        self._copy = copy
        self._keep_export = keep_export
        self._kept: tuple[list[Any], _native.Export] | None = None
        self._ring: _native.Ring | None = None
        self._slot_bytes = 0
        self._connected = False

    def connect(self) -> None:
        """Asks the workers whether they can receive. ``send`` calls it if it was not called before."""
        self._initialize(None)

    def _initialize(self, ring: str | None) -> None:
        self._client.init_weight_transfer_engine({"ring": ring, "timeout": self._timeout, "copy": self._copy})
        self._connected = True

    def send(self, weights: Iterable[tuple[str, Any]], layout: Sequence[Layout] | None = None) -> None:
        """Sends pairs of a name and a tensor; returns when all workers have loaded them.

        ``layout`` is what ``weights`` will yield, in order. A ring needs it beforehand; without it, ``weights`` must be a collection
        that can be iterated twice.

        Raises ``LayoutError`` if ``weights`` are not those of ``layout``, ``TimeoutError`` and ``GoneError`` if the workers do not read, and
        the exceptions of the client.
        """
        if self._bucket_bytes == 0:
            self._send_export(weights, layout)
        else:
            self._send_buckets(weights, [Layout.of(*pair) for pair in weights] if layout is None else layout)

    def close(self) -> None:
        """Frees the buckets, and ends an export that was kept; workers that still read them are notified. ``send`` makes new ones."""
        self._forget()
        ring, self._ring = self._ring, None
        if ring is not None:
            # Does not wait for the workers, which keep what they have open.
            ring.__exit__(GeneratorExit, None, None)

    def _send_export(self, weights: Iterable[tuple[str, Any]], layout: Sequence[Layout] | None) -> None:
        state: dict[str, Any] = {}
        for name, tensor in weights if layout is None else checked(weights, layout):
            if name in state:
                raise LayoutError(f"the tensor {name!r} was given twice; each name can be sent once in an update")
            state[name] = tensor.detach()
        export = self._share(state)
        try:
            if not self._connected:
                self.connect()
            with updating(self._client):
                self._client.update_weights({"weights": str(export)})
            if not self._keep_export:
                export.close(self._timeout)
        except BaseException:
            self._kept = None
            # Does not wait for the workers, which keep what they have open.
            export.__exit__(GeneratorExit, None, None)
            raise

    def _share(self, state: dict[str, Any]) -> _native.Export:
        """Returns a new export, or the one that was kept if the tensors are the same."""
        import torch

        if not self._keep_export:
            return _native.share(state)
        # No other tensor can be at these addresses, since the export keeps the memory.
        tensors = [(name, one.data_ptr(), one.dtype, one.shape, one.stride()) for name, one in state.items()]
        if self._kept is not None and self._kept[0] == tensors:
            # The workers waited for the first version only when they opened the export.
            for device in {one.device for one in state.values() if one.device.type != "cpu"}:
                torch.accelerator.current_stream(device).synchronize()
            return self._kept[1]
        self._forget()
        export = _native.share(state)
        self._kept = tensors, export
        return export

    def _forget(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].__exit__(GeneratorExit, None, None)

    def _send_buckets(self, weights: Iterable[tuple[str, Any]], layout: Sequence[Layout]) -> None:
        pairs = checked(weights, layout)
        first = next(pairs, None)
        if first is None:
            raise LayoutError("there are no weights to send")
        slot_bytes = align(max(self._bucket_bytes, *(one.nbytes for one in layout)), SLOT_ALIGNMENT)
        if self._ring is None or slot_bytes > self._slot_bytes:
            self._make_ring(first[1], slot_bytes)
        buckets = plan(layout, self._slot_bytes)
        # The workers join the ring at the start, before anything is published.
        with updating(self._client):
            try:
                # The workers' reply comes when they have read everything.
                with ThreadPoolExecutor(1, "device-ipc-vllm") as pool:
                    request = pool.submit(self._client.update_weights, {"buckets": buckets})
                    try:
                        self._write(buckets, chain(first, pairs), request)
                    except BaseException:
                        # Workers that wait for a bucket receive the end of the ring.
                        self.close()
                        raise
                    request.result()
            except BaseException:
                self.close()
                raise

    def _make_ring(self, tensor: Any, slot_bytes: int) -> None:
        self.close()
        memory = _native.empty((self._slots, slot_bytes), "uint8", ring_device(tensor))
        self._ring, self._slot_bytes = _native.Ring(memory, slots=self._slots), slot_bytes
        self._initialize(str(self._ring))

    def _write(self, buckets: list[Any], pairs: Iterator[tuple[str, Any]], request: Future[Any]) -> None:
        import torch

        assert self._ring is not None
        for number, bucket in enumerate(buckets):
            with self._slot(f"{number} of {len(buckets)}", request) as slot:
                memory = torch.from_dlpack(slot)  # type: ignore[attr-defined]
                for (*_, offset), (_name, tensor) in zip(bucket, pairs):
                    source = tensor.detach().reshape(-1).view(torch.uint8)
                    memory[offset : offset + source.numel()].copy_(source, non_blocking=True)
                del memory
        # Ends the source, whose collectives other ranks take part in, and finds tensors too many.
        next(pairs, None)

    def _slot(self, number: str, request: Future[Any]) -> _native.RingWriteSlot:
        """Returns the next slot, or raises an exception when the workers will not read it."""
        assert self._ring is not None
        limit = time.monotonic() + self._timeout
        while True:
            rest = max(0.0, limit - time.monotonic())
            unread = self._ring.readers == 0
            if unread:
                # The reply says why the workers have left.
                futures.wait([request], rest)
            if request.done():
                request.result()
                raise GoneError(f"the workers replied after {number} buckets; are they those of this trainer?")
            if unread:
                raise GoneError(f"no worker reads the ring, before bucket {number}; see the logs of vLLM's workers")
            try:
                return self._ring.write(timeout=min(REQUEST_INTERVAL, rest))
            except TimeoutError:
                if rest <= REQUEST_INTERVAL:
                    raise TimeoutError(f"no slot of the ring is free after {self._timeout} s, before bucket {number}") from None


@contextlib.contextmanager
def updating(client: Any) -> Iterator[None]:
    """Returns a context that is one update of the workers. One that fails is finished too: else vLLM refuses the next."""
    try:
        client.start_weight_update()
        yield
        client.finish_weight_update()
    except Exception:
        # Workers that have failed refuse it, those whose weights in place end with them fail once, and a server that has exited does not reply.
        for _ in range(2):
            with contextlib.suppress(Exception):
                client.finish_weight_update()
        raise


def checked(weights: Iterable[tuple[str, Any]], layout: Sequence[Layout]) -> Iterator[tuple[str, Any]]:
    """Yields the weights, which must be those of the layout, in its order."""
    expected = iter(layout)
    for name, tensor in weights:
        given, wanted = Layout.of(name, tensor), next(expected, None)
        if wanted is None:
            raise LayoutError(f"the weights contain {name!r}, which their metadata does not list")
        if given != wanted:
            raise LayoutError(f"the weights contain {given}, where their metadata lists {wanted}")
        yield name, tensor
    missing = next(expected, None)
    if missing is not None:
        raise LayoutError(f"the weights do not contain {missing.name!r}, which their metadata lists")


def plan(layout: Sequence[Layout], slot_bytes: int) -> list[list[list[Any]]]:
    """Divides tensors into buckets, each a list of ``[name, dtype, shape, offset in bytes]``."""
    buckets: list[list[list[Any]]] = [[]]
    end = 0
    for one in layout:
        begin = align(end, ALIGNMENT)
        if begin + one.nbytes > slot_bytes and buckets[-1]:
            buckets.append([])
            begin = 0
        buckets[-1].append([one.name, one.dtype, list(one.shape), begin])
        end = begin + one.nbytes
    return buckets


def align(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def chain(first: tuple[str, Any], rest: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    yield first
    yield from rest


def ring_device(tensor: Any) -> Any:
    """Returns the device of the buckets: that of the tensor, or the current one where the weights are in host memory."""
    import torch

    if tensor.device.type == "cpu" and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return tensor.device

"""Twins of verl's bucketed sender and receiver, over a ring. Importing this module imports neither torch nor verl.

The classes have the constructors and methods of those of ``verl.workers.rollout.vllm_rollout.bucketed_weight_transfer``. Buckets
are slots of a ring: the sender fills one while the receiver reads the other, in the order of their streams. What a bucket contains
is sent as JSON. Nothing is pickled, and the host synchronises with the device for no bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from . import _native
from . import torch as _tensors
from ._errors import Error, TimeoutError

__all__ = ["BucketedWeightReceiver", "BucketedWeightSender"]

# Tensors begin at multiples of it in a bucket, in bytes.
_ALIGNMENT = 256
# Seconds that a side waits for the other one to do anything at all.
TIMEOUT = 600.0
# Seconds after which a wait for the ring looks whether a receiver has ended.
_INTERVAL = 0.5


def name_of(zmq_handle: str) -> str:
    """Returns the name of the channel for the address that verl gives to both sides."""
    return "verl-" + hashlib.sha256(zmq_handle.encode()).hexdigest()[:32]


class BucketedWeightSender:
    """Sends weights to one receiver, in buckets of ``bucket_size_mb`` MiB, of which two are allocated during a call.

    ``use_shm`` has no effect. ``device`` is a device of ``device_ipc.empty``, by default the one of the first weight.
    """

    def __init__(
        self, zmq_handle: str, bucket_size_mb: int = 512, use_shm: bool = False, *, device: Any = None
    ) -> None:
        self.zmq_handle = zmq_handle
        self.bucket_size_mb = bucket_size_mb
        self.bucket_size = int(bucket_size_mb) << 20
        self.use_shm = use_shm
        self.device = device

    async def async_send_weights(self, weights: Any) -> None:
        """Sends pairs of names and tensors, of an iterable or an asynchronous one. Returns when all have been received.

        Raises ``GoneError`` if the receiver ends before that. As in verl, the call blocks its thread.
        """
        with _native.listen(name_of(self.zmq_handle)) as listener:
            channel = listener.accept(timeout=TIMEOUT)
        await send(weights, [channel], self.bucket_size, self.device)


async def send(weights: Any, channels: list[_native.Channel], bucket_bytes: int, device: Any = None) -> None:
    """Sends weights to the receivers of these channels, by one ring, and closes the channels.

    Returns when all have received everything.
    """
    try:
        await _send(weights, channels, bucket_bytes, device)
    except BaseException:
        # Without a wait for the receivers, so that this exception is the one that the caller gets.
        for channel in channels:
            with contextlib.suppress(Error):
                channel.close(timeout=0)
        raise
    for channel in channels:
        channel.close(timeout=TIMEOUT)


async def _send(weights: Any, channels: list[_native.Channel], bucket_bytes: int, device: Any) -> None:
    import torch

    def tell(content: dict[str, Any], *tensors: Any) -> None:
        for channel in channels:
            channel.send(json.dumps(content).encode(), *tensors, timeout=TIMEOUT)

    ring: _native.Ring | None = None
    slot: _native.RingWriteSlot | None = None
    buffer: Any = None
    content: list[Any] = []
    used = 0
    async for name, weight in iterate(weights):
        weight = weight.detach()
        if ring is None:
            slot_bytes = math.ceil(bucket_bytes / _ALIGNMENT) * _ALIGNMENT
            memory = _native.empty((2, slot_bytes), "uint8", device or _device(weight))
            ring = _native.Ring(memory, slots=2)
            tell({"ring": str(ring)})
            _wait_readers(ring, channels)
        described = [name, str(weight.dtype).removeprefix("torch."), list(weight.shape)]
        if used + weight.nbytes > bucket_bytes and slot is not None:
            buffer = None
            slot.publish()
            tell({"bucket": content})
            slot, content, used = None, [], 0
        if weight.nbytes > bucket_bytes:
            # The weight itself is shared: the message keeps it until the receiver has released it.
            tell({"large": described}, weight)
            continue
        if slot is None:
            slot = ring.write(timeout=TIMEOUT)
            buffer = torch.from_dlpack(slot).view(-1)  # type: ignore[attr-defined]
        if weight.nbytes:
            part = buffer[used : used + weight.nbytes].view(weight.dtype).view(weight.shape)
            part.copy_(weight, non_blocking=True)
        content.append([*described, used])
        used += math.ceil(weight.nbytes / _ALIGNMENT) * _ALIGNMENT
    buffer = None
    if slot is not None:
        slot.publish()
    tell({"bucket": content, "is_last": True})
    for channel in channels:
        # A receiver answers when it has loaded and released everything.
        channel.receive(timeout=TIMEOUT)
    if ring is not None:
        ring.close(timeout=TIMEOUT)


def _wait_readers(ring: _native.Ring, channels: list[_native.Channel]) -> None:
    """Waits until all receivers have joined the ring. Raises ``GoneError`` if one of them has ended instead."""
    limit = time.monotonic() + TIMEOUT
    while True:
        rest = max(0.0, limit - time.monotonic())
        try:
            return ring.wait_readers(len(channels), timeout=min(_INTERVAL, rest))
        except TimeoutError:
            if rest <= _INTERVAL:
                raise
        for channel in channels:
            # A receiver sends nothing before it has received everything.
            with contextlib.suppress(TimeoutError):
                channel.receive(timeout=0)


class BucketedWeightReceiver:
    """Receives the weights of a ``BucketedWeightSender`` with the same ``zmq_handle``. ``use_shm`` has no effect."""

    def __init__(self, zmq_handle: str, device: Any, use_shm: bool = False) -> None:
        self.zmq_handle = zmq_handle
        self.device = device
        self.use_shm = use_shm

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, Any]], bool], object]) -> None:
        """Calls a function with the tensors of each bucket, and whether it is the last one.

        The tensors lie in the bucket, which the sender fills again after the call: copy those that are to stay. Raises
        ``GoneError`` if the sender ends before the last bucket.
        """
        with _native.connect(name_of(self.zmq_handle), timeout=TIMEOUT) as channel:
            for weights, is_last in received(channel, self.device):
                on_bucket_received(weights, is_last)


def received(channel: _native.Channel, device: Any) -> Iterator[tuple[list[tuple[str, Any]], bool]]:
    """Yields the tensors of each bucket, and whether it is the last one. A bucket is released when the next one is asked for."""
    import torch

    kind = getattr(device, "type", str(device).partition(":")[0])
    device = None if kind == "cpu" else device
    reader: _native.RingReader | None = None
    is_last = False
    while not is_last:
        message = channel.receive(timeout=TIMEOUT)
        told = json.loads(message.data)
        if "ring" in told:
            # Writable: torch takes no read-only memory of a device by DLPack.
            reader = _native.join(told["ring"], device=device, timeout=TIMEOUT)
            continue
        is_last = told.get("is_last", False)
        if "large" in told:
            name, dtype, shape = told["large"]
            with _tensors.Tensors(message.open(device=device, allow_read_only=True, timeout=TIMEOUT)) as opened:
                yield [(name, opened.tensor)], is_last
            continue
        if not told["bucket"]:
            yield [], is_last
            continue
        assert reader is not None, "a bucket came before the ring"
        slot = reader.next(timeout=TIMEOUT)
        assert slot is not None, "the ring has ended before its last bucket"
        buffer = torch.from_dlpack(slot).view(-1)  # type: ignore[attr-defined]
        weights = []
        for name, dtype, shape, offset in told["bucket"]:
            element = getattr(torch, dtype)
            nbytes = element.itemsize * math.prod(shape)
            weights.append((name, buffer[offset : offset + nbytes].view(element).view(shape)))
        yield weights, is_last
        del weights, buffer
        slot.release()
    if reader is not None:
        reader.close()
    channel.send(b"received", timeout=TIMEOUT)


def _device(weight: Any) -> str | None:
    """Returns the device of a weight. A tensor of the CPU names none: the first device is taken."""
    return None if weight.device.type == "cpu" else str(weight.device)


async def iterate(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair

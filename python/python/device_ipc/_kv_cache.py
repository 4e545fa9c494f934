"""KV caches of engines on one machine: blocks of one engine's requests, read by another engine from a mapping of the whole cache.

The exporter's engine has computed the blocks of a request. It keeps them until an importer has read them, has died, or has not claimed
them within a time limit. A connection of the importer's process stands for all its claims, so there are no heartbeats:

1. The importer connects once, receives the descriptor of the caches, and opens them: one mapping for all requests.
2. It *claims* each request that it is to read. The answer says whether the exporter still has the blocks. From then on they stay.
3. It copies the blocks on its own stream, and says that it has *read* them once the device has done so.

The exporter announces a request after its device has written the blocks (the host knows the first token by then), so a copy waits for no
event of the exporter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _native
from . import torch as dt
from ._blocks import BlockCopy
from ._errors import Error, LayoutError, TimeoutError

_logger = logging.getLogger(__name__)

_SEND_SECONDS = 10.0
"""The time in which a peer has to take a message of some bytes."""

_CONNECT_SECONDS = 5.0
"""The time in which an exporter has to accept. Its name is known since it runs; one that is not there has ended, and does not come back."""


def block_views(cache: Any, blocks: int) -> list[Any]:
    """Returns views of a cache whose first axis is that of the engine's blocks.

    A cache is one tensor with the blocks first, or keys and values as the first axis and the blocks as the second. A kernel's block may be
    a part of an engine's block. Raises ``LayoutError`` for anything else.
    """
    if cache.ndim > 1 and len(cache) == 2 and cache.shape[1] >= blocks and cache.shape[1] % blocks == 0:
        parts = [cache[0], cache[1]]
    elif len(cache) >= blocks and len(cache) % blocks == 0:
        parts = [cache]
    else:
        raise LayoutError(f"a KV cache of shape {tuple(cache.shape)} has no axis for {blocks} blocks as its first or second one")
    return [part.unflatten(0, (blocks, len(part) // blocks)) for part in parts]


def _close(channel: _native.Channel) -> None:
    """Ends a connection without a wait for what the peer has not received."""
    with contextlib.suppress(Error):
        channel.close(timeout=0)


@dataclass
class _Claims:
    """One connection of an importer."""

    channel: _native.Channel
    requests: set[str] = field(default_factory=set)


class CacheExporter:
    """Shares the KV caches of an engine's worker, and knows which requests' blocks importers have yet to read.

    ``caches`` maps the names of the layers to torch tensors with ``blocks`` blocks. ``facts`` are what must be equal in an importer. Blocks
    that no importer claims within ``limit`` seconds are given up. All methods return at once.
    """

    def __init__(self, caches: Mapping[str, Any], blocks: int, facts: Mapping[str, Any], limit: float) -> None:
        for cache in caches.values():
            block_views(cache, blocks)
        self._limit = limit
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._deadlines: dict[str, float] = {}
        self._returned: set[str] = set()
        self._claims: dict[int, _Claims] = {}
        self._export = _native.share(dict(caches))
        hello = {"caches": str(self._export), "blocks": blocks, "facts": dict(facts)}
        self._hello = json.dumps(hello).encode()
        self.name = f"kv-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        """The name to which importers connect."""
        self._listener = _native.listen(self.name)
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="device-ipc-kv", daemon=True)
        self._thread.start()

    def offer(self, request: str) -> None:
        """Announces a request whose blocks are being computed."""
        with self._lock:
            self._known.add(request)

    def lend(self, request: str) -> None:
        """Keeps the blocks of a request that was offered, until ``returned`` names it."""
        with self._lock:
            if request in self._known:
                self._deadlines[request] = time.monotonic() + self._limit

    def withdraw(self, request: str) -> None:
        """Takes an offer back: the request has ended without blocks to read."""
        with self._lock:
            self._known.discard(request)

    def returned(self) -> set[str]:
        """Returns the requests whose blocks may be freed, each once."""
        now = time.monotonic()
        with self._lock:
            for request in [name for name, deadline in self._deadlines.items() if deadline <= now]:
                del self._deadlines[request]
                self._give_back(request)
                if request in self._returned:
                    _logger.warning("no engine has claimed the KV blocks of request %s within %.0f s", request, self._limit)
            returned, self._returned = self._returned, set()
            return returned

    def close(self, timeout: float = 2.0) -> None:
        """Ends the connections and the export. The memory stays allocated for importers that have not closed it within ``timeout`` seconds."""
        wake, self._wake = self._wake, -1
        if wake < 0:
            return
        os.close(wake)
        self._thread.join()
        try:
            self._export.close(timeout=timeout)
        except TimeoutError as error:
            _logger.warning("the KV caches are still in use by other engines, which close them when they look: %s", error)

    def _give_back(self, request: str) -> None:
        """Returns the blocks, unless another importer has claimed them too."""
        if request in self._known and not any(request in claims.requests for claims in self._claims.values()):
            self._known.remove(request)
            self._deadlines.pop(request, None)
            self._returned.add(request)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(os.close, self._woken)
            stack.callback(self._listener.close)
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener.fileno(), selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._woken:
                        for claims in self._claims.values():
                            _close(claims.channel)
                        return
                    try:
                        if key.data is None:
                            self._accept(selector)
                        else:
                            self._receive(selector, key.data)
                    except Exception:
                        _logger.exception("a connection to the KV caches has failed")

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            channel = self._listener.accept(timeout=0)
        except TimeoutError:
            return
        channel.send(self._hello, timeout=_SEND_SECONDS)
        claims = _Claims(channel)
        with self._lock:
            self._claims[channel.fileno()] = claims
        selector.register(channel.fileno(), selectors.EVENT_READ, claims)

    def _receive(self, selector: selectors.BaseSelector, claims: _Claims) -> None:
        try:
            while True:
                message = json.loads(claims.channel.receive(timeout=0).data)
                answer = self._answer(claims, message.get("claim", ()), message.get("read", ()))
                if answer is not None:
                    claims.channel.send(json.dumps(answer).encode(), timeout=_SEND_SECONDS)
        except TimeoutError:
            return
        except Exception as error:
            # The engine has ended or died; or it does not speak this protocol. It reads nothing any more.
            selector.unregister(claims.channel.fileno())
            with self._lock:
                del self._claims[claims.channel.fileno()]
                for request in claims.requests:
                    self._give_back(request)
            if claims.requests:
                _logger.warning("process %d has ended with %d requests to read: %s", claims.channel.peer, len(claims.requests), error)
            _close(claims.channel)

    def _answer(self, claims: _Claims, claimed: Iterable[str], read: Iterable[str]) -> dict[str, list[str]] | None:
        granted, gone = [], []
        with self._lock:
            for request in claimed:
                if request in self._known:
                    claims.requests.add(request)
                    granted.append(request)
                else:
                    gone.append(request)
            for request in read:
                if request in claims.requests:
                    claims.requests.remove(request)
                    self._give_back(request)
        return {"granted": granted, "gone": gone} if granted or gone else None


@dataclass
class Load:
    """Blocks of a request that are to be copied: ``sources[i]`` of the exporter to ``destinations[i]``."""

    request: str
    remote: str
    """The exporter's name of the request."""
    sources: Sequence[int]
    destinations: Sequence[int]


class _Peer:
    """An exporter's worker. A thread of its own connects, as that takes milliseconds."""

    def __init__(self, importer: CacheImporter, name: str) -> None:
        self._importer = importer
        self._name = name
        self.failure: str | None = None
        self.channel: _native.Channel | None = None
        self.copy: BlockCopy | None = None
        self._tensors: dt.Tensors | None = None
        self._asked: set[str] = set()
        self.granted: set[str] = set()
        self.gone: set[str] = set()
        self._to_claim: list[str] = []
        self.loads: list[Load] = []
        self.running: list[tuple[Load, Any]] = []
        self._thread = threading.Thread(target=self._connect, name="device-ipc-kv", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        try:
            channel = _native.connect(self._name, timeout=min(self._importer.timeout, _CONNECT_SECONDS))
            hello = json.loads(channel.receive(timeout=self._importer.timeout).data)
            self._importer.check(hello["facts"])
            device = self._importer.device
            tensors = dt.open(hello["caches"], device=device, allow_read_only=True, timeout=self._importer.timeout)
            sources = []
            for name in self._importer.caches:
                if name not in tensors:
                    raise LayoutError(f"the other engine has no layer {name}")
                sources += block_views(tensors[name], hello["blocks"])
            self.copy = BlockCopy(self._importer.views, sources)
            self._tensors = tensors
            self.channel = channel
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def claim(self, remote: str) -> None:
        if remote not in self._asked:
            self._asked.add(remote)
            self._to_claim.append(remote)

    def read(self, remote: str) -> None:
        """Tells the exporter that nothing reads the blocks of a request any more."""
        self._asked.discard(remote)
        self.granted.discard(remote)
        self.gone.discard(remote)
        self._send({"read": [remote]})

    def progress(self) -> None:
        """Sends claims, and takes the answers."""
        if self.channel is None or self.failure is not None:
            return
        if self._to_claim:
            self._send({"claim": self._to_claim})
            self._to_claim = []
        try:
            while True:
                answer = json.loads(self.channel.receive(timeout=0).data)
                self.granted.update(self._asked.intersection(answer["granted"]))
                self.gone.update(self._asked.intersection(answer["gone"]))
        except TimeoutError:
            pass
        except Error as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _send(self, message: Mapping[str, Any]) -> None:
        if self.channel is None or self.failure is not None:
            return
        try:
            self.channel.send(json.dumps(message).encode(), timeout=_SEND_SECONDS)
        except Error as error:
            self.failure = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self._thread.join()
        if self.channel is not None:
            # The exporter gives back what this connection has claimed, also where it has not received the last message.
            _close(self.channel)
        self.copy = None
        if self._tensors is not None:
            self._tensors.mapping.close()


class CacheImporter:
    """Copies blocks of other engines' caches into those of this engine's worker.

    ``caches`` and ``facts`` as for ``CacheExporter``. All methods but ``close`` return at once, and belong to one thread. ``poll`` drives the
    loads.
    """

    def __init__(self, caches: Mapping[str, Any], blocks: int, facts: Mapping[str, Any], timeout: float = 30.0) -> None:
        self.caches = dict(caches)
        self.views = [view for cache in self.caches.values() for view in block_views(cache, blocks)]
        self.device = str(self.views[0].device) if self.views[0].device.type != "cpu" else None
        self.timeout = timeout
        self._facts = dict(facts)
        self._peers: dict[str, _Peer] = {}
        self._stream: Any = None

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raises ``LayoutError`` with the first difference to the facts of another engine."""
        for name in sorted({*self._facts, *facts}):
            here, there = self._facts.get(name), facts.get(name)
            if here != there:
                raise LayoutError(f"the engines differ in {name}: {there!r} there and {here!r} here")

    def claim(self, peer: str, remote: str) -> None:
        """Makes an exporter keep the blocks of a request until ``load`` has read them, or ``release`` is called."""
        self._peer(peer).claim(remote)

    def release(self, peer: str, remote: str) -> None:
        """Gives blocks up that are not to be read."""
        found = self._peer(peer)
        found.claim(remote)
        found.loads.append(Load("", remote, (), ()))

    def load(self, peer: str, load: Load) -> None:
        """Begins to copy the blocks of a request. ``poll`` names it at the end."""
        found = self._peer(peer)
        found.claim(load.remote)
        found.loads.append(load)

    def poll(self) -> tuple[set[str], list[tuple[Load, str]]]:
        """Returns the requests whose blocks have come, and the loads that have failed with the reasons, each once."""
        done: set[str] = set()
        failed: list[tuple[Load, str]] = []
        for name, peer in list(self._peers.items()):
            peer.progress()
            self._finish(peer, done)
            self._begin(peer, failed)
            self._finish(peer, done)
            if peer.failure is not None:
                failed += [(load, peer.failure) for load in peer.loads if load.request]
                peer.loads.clear()
                if not peer.running:
                    _logger.info("the KV caches of %s are no longer used: %s", name, peer.failure)
                    del self._peers[name]
                    peer.close()
        return done, failed

    def close(self) -> None:
        """Ends all connections."""
        if self._stream is not None:
            self._stream.synchronize()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _peer(self, name: str) -> _Peer:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(self, name)
        return peer

    def _begin(self, peer: _Peer, failed: list[tuple[Load, str]]) -> None:
        waiting = []
        for load in peer.loads:
            if load.remote in peer.granted:
                if load.sources:
                    assert peer.copy is not None
                    try:
                        peer.running.append((load, self._copy(peer.copy, load)))
                    except (IndexError, ValueError) as error:
                        failed.append((load, str(error)))
                        peer.read(load.remote)
                else:
                    peer.running.append((load, None))
            elif load.remote in peer.gone:
                peer.read(load.remote)
                if load.request:
                    failed.append((load, "the other engine no longer has the blocks"))
            else:
                waiting.append(load)
        peer.loads = waiting

    def _copy(self, copy: BlockCopy, load: Load) -> Any:
        """Submits a copy behind the work on the current stream, which may still use the destinations. Returns an event."""
        if self.device is None:
            copy.copy(load.sources, load.destinations)
            return None
        import torch

        if self._stream is None:
            self._stream = torch.Stream(self.device)
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            copy.copy(load.sources, load.destinations)
        return self._stream.record_event()

    @staticmethod
    def _finish(peer: _Peer, done: set[str]) -> None:
        running = []
        for load, event in peer.running:
            if event is not None and not event.query():
                running.append((load, event))
                continue
            peer.read(load.remote)
            if load.request:
                done.add(load.request)
        peer.running = running

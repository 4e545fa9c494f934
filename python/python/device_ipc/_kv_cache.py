"""KV caches of engines on one machine: blocks of one engine's requests, read by another engine from a mapping of the whole cache.

The exporter's engine has computed the blocks of a request, whose number is its *ticket*. It keeps them until an importer has read them, has
died, or has not claimed them within a time limit. A connection of the importer's process stands for all its claims, so there are no
heartbeats:

1. The importer connects once, receives the descriptor of the caches and a table of claims, and opens them: one mapping for all requests.
2. It *claims* each ticket that it is to read, by a change of a word in the table, which both processes map. A ticket that the exporter
   does not offer any more has failed. From then on the blocks stay.
3. It copies the blocks on its own stream.
4. It *releases* the ticket, in the table too, once the device has copied the blocks. The exporter's engine finds that in its next step.

So no message and no system call belongs to a request, and no thread of the exporter wakes up for it. The exporter announces a request after
its device has written the blocks (the host knows the first token by then), so a copy waits for no event of the exporter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import selectors
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _backends, _native
from . import torch as dt
from ._blocks import BlockCopy
from ._errors import Error, LayoutError, TimeoutError, UnsupportedError

_logger = logging.getLogger(__name__)

_SEND_SECONDS = 10.0
"""The time in which a peer has to take a message of some bytes."""


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


@dataclass(eq=False)
class _Importer:
    """One connection of an importer."""

    channel: _native.Channel
    number: int
    """Its number in the table of claims."""


class CacheExporter:
    """Shares the KV caches of an engine's worker, and knows which requests' blocks importers have yet to read.

    ``caches`` maps the names of the layers to torch tensors with ``blocks`` blocks. ``facts`` are what must be equal in an importer. Blocks
    that no importer claims within ``limit`` seconds are given up. Importers connect to ``name``. All methods return at once, and all but
    ``close`` belong to one thread.
    """

    def __init__(self, name: str, caches: Mapping[str, Any], blocks: int, facts: Mapping[str, Any], limit: float) -> None:
        for cache in caches.values():
            block_views(cache, blocks)
        self._limit = limit
        self._known: dict[int, str] = {}
        self._deadlines: dict[int, float] = {}
        """The latest times of claims, in their order."""
        self._due = math.inf
        """The first deadline."""
        self._claims = _native._ClaimTable()
        self._importers: list[_Importer] = []
        self._export = _native.share(dict(caches))
        self._hello = {"caches": str(self._export), "blocks": blocks, "facts": dict(facts)}
        self._listener = _native.listen(name, backend=self._export.descriptor.backend)
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="device-ipc-kv", daemon=True)
        self._thread.start()

    def offer(self, ticket: int, request: str) -> None:
        """Announces a request whose blocks are being computed."""
        self._known[ticket] = request
        if not self._claims.offer(ticket):
            _logger.warning("the table of claims has no room for request %s, whose blocks no engine can read", request)

    def lend(self, ticket: int) -> None:
        """Keeps the blocks of a request that was offered, until ``returned`` names it."""
        if ticket in self._known:
            deadline = self._deadlines[ticket] = time.monotonic() + self._limit
            self._due = min(self._due, deadline)

    def withdraw(self, ticket: int) -> None:
        """Takes an offer back: the request has ended without blocks to read."""
        self._known.pop(ticket, None)
        self._claims.withdraw(ticket)

    def returned(self) -> set[str]:
        """Returns the requests whose blocks may be freed, each once."""
        released, now = self._claims.released(), time.monotonic()
        if not released and now < self._due:
            return set()
        found = set()
        for ticket in released:
            self._deadlines.pop(ticket, None)
            found.add(self._known.pop(ticket))
        late = []
        for ticket, deadline in self._deadlines.items():
            if deadline > now:
                break
            late.append(ticket)
        for ticket in late:
            del self._deadlines[ticket]
            if self._claims.take_back(ticket):
                request = self._known.pop(ticket)
                found.add(request)
                _logger.warning("no engine has claimed the KV blocks of request %s within %.0f s", request, self._limit)
        self._due = next(iter(self._deadlines.values()), math.inf)
        return found

    def close(self, timeout: float = 2.0) -> None:
        """Ends the connections and the export. The memory stays allocated for importers that have not closed it within ``timeout`` seconds."""
        wake, self._wake = self._wake, -1
        if wake < 0:
            return
        for ticket in self._known:
            self._claims.withdraw(ticket)
        os.close(wake)
        self._thread.join()
        try:
            self._export.close(timeout=timeout)
        except TimeoutError as error:
            _logger.warning("the KV caches are still in use by other engines, which close them when they look: %s", error)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(os.close, self._woken)
            stack.callback(self._listener.close)
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener.fileno(), selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._woken:
                        for importer in self._importers:
                            _close(importer.channel)
                        return
                    try:
                        if key.data is None:
                            self._accept(selector)
                        else:
                            self._end(selector, key.data)
                    except Exception:
                        _logger.exception("a connection to the KV caches has failed")

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            channel = self._listener.accept(timeout=0)
        except TimeoutError:
            return
        try:
            importer = _Importer(channel, self._claims.admit(channel))
        except UnsupportedError as error:
            # More than the table has room for.
            channel.send(json.dumps({"refused": str(error)}).encode(), timeout=_SEND_SECONDS)
            _close(channel)
            return
        self._importers.append(importer)
        selector.register(channel.fileno(), selectors.EVENT_READ, importer)
        channel.send(json.dumps({**self._hello, "importer": importer.number}).encode(), timeout=_SEND_SECONDS)

    def _end(self, selector: selectors.BaseSelector, importer: _Importer) -> None:
        """Releases the claims of an importer that has ended, or that does not speak this protocol."""
        try:
            importer.channel.receive(timeout=0)
            reason = "it sends messages, which this version of device-ipc does not expect"
        except TimeoutError:
            return
        except Exception as error:
            reason = str(error)
        selector.unregister(importer.channel.fileno())
        self._importers.remove(importer)
        claims = self._claims.dismiss(importer.number)
        if claims:
            _logger.warning("process %d has ended with %d requests to read: %s", importer.channel.peer, claims, reason)
        _close(importer.channel)


@dataclass(eq=False)
class Load:
    """Blocks of a request that are to be copied."""

    request: str
    ticket: int
    parts: list[tuple[array[int], array[int]]]
    """For each group of layers the exporter's blocks and those of this engine: arrays of the type code ``I``."""
    failure: str | None = None


class _Peer:
    """An exporter's worker. A thread of its own connects, as that takes milliseconds."""

    def __init__(self, importer: CacheImporter, name: str) -> None:
        self._importer = importer
        self.name = name
        self.failure: str | None = None
        self.channel: _native.Channel | None = None
        """Set when everything is ready."""
        self._claims: _native._Claims | None = None
        self._readable = select.poll()
        self._lock = threading.Lock()
        """Held while copies begin, and while the memory is unmapped: a thread of the library does so when the exporter has ended."""
        self._copies: list[_native._BlockCopy] = []
        self._tensors: dt.Tensors | None = None
        self._changes: list[tuple[int, bool]] = []
        """Tickets to claim (True) or to release (False) when the connection is ready."""
        self.loads: list[Load] = []
        """Those that have not begun."""
        self._running: deque[tuple[_native._SubmittedCopies, list[Load]]] = deque()
        """Copies in their order, with the loads that were submitted together."""
        self._thread = threading.Thread(target=self._connect, name="device-ipc-kv", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        try:
            importer = self._importer
            backend = _backends.of(importer.kind)
            channel = _native.connect(self.name, backend=backend, timeout=importer.timeout, existing=True)
            hello = json.loads(channel.receive(timeout=importer.timeout).data)
            if "refused" in hello:
                raise UnsupportedError(f"the other engine has refused: {hello['refused']}")
            importer.check(hello["facts"])
            self._claims = _native._Claims(channel, hello["importer"], importer.timeout)
            self._tensors = tensors = dt.open(hello["caches"], device=importer.device, allow_read_only=True, timeout=importer.timeout)
            for layers in importer.groups:
                sources = []
                for name in layers:
                    if name not in tensors:
                        raise LayoutError(f"the other engine has no layer {name}")
                    sources += block_views(tensors[name], hello["blocks"])
                self._copies.append(BlockCopy([view for name in layers for view in importer.views[name]], sources)._copy)
            self._readable.register(channel.fileno(), select.POLLIN)
            # Its descriptor is readable when an attempt is worthwhile, after one that was not.
            with contextlib.suppress(TimeoutError):
                channel.receive(timeout=0)
            self.channel = channel
            tensors.mapping.on_gone(self._give_up)
            tensors.mapping.on_dropped(self._give_up)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _give_up(self) -> None:
        """Unmaps the caches of an exporter that has ended. An engine without requests makes no steps, and would keep them for ever."""
        with self._lock:
            self.failure = self.failure or "the other engine has ended"
            if not self._running:
                self._unmap()
        self._importer.look_at(self)

    def _unmap(self) -> None:
        self._copies.clear()
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            with contextlib.suppress(Error):
                tensors.close()

    def change(self, ticket: int, claims: bool) -> None:
        """Claims or releases a ticket."""
        self._changes.append((ticket, claims))

    def is_busy(self) -> bool:
        return bool(self._running or self.loads or (self.channel is None and self.failure is None))

    def has_news(self) -> bool:
        """Returns whether ``advance`` has something to do: the first copies have ended, or the connection has changed."""
        if self._running:
            return self._running[0][0].query()
        return self.channel is not None or self.failure is not None

    def check(self) -> None:
        """Notices the exporter's end."""
        if self.channel is None or self.failure is not None or not self._readable.poll(0):
            return
        try:
            self.channel.receive(timeout=0)
        except TimeoutError:
            pass
        except Error as error:
            self.failure = f"{type(error).__name__}: {error}"

    def begin(self) -> None:
        """Makes the changes in the table of claims, and submits the copies of all loads, if the connection is ready."""
        if self.channel is None or self.failure is not None:
            return
        assert self._claims is not None
        for ticket, claims in self._changes:
            if claims:
                self._claims.claim(ticket)
            else:
                self._claims.release(ticket)
        self._changes.clear()
        if not self.loads:
            return
        with self._lock:
            if self.failure is not None:
                return
            loads, self.loads = self.loads, []
            begun = []
            for load in loads:
                if self._claims.claim(load.ticket):
                    begun.append(load)
                else:
                    load.failure = "the other engine no longer has the blocks"
            copies = self._importer.queue.submit(self._copies, [load.parts for load in begun])
            for position, reason in copies.failures:
                begun[position].failure = reason
            self._running.append((copies, loads))

    def advance(self, done: set[str], failed: list[tuple[Load, str]]) -> None:
        """Reports the loads whose copies have ended. Before the end of a copy nothing else may write its blocks."""
        self.begin()
        if self._running:
            self.check()
        while self._running and self._running[0][0].query():
            for load in self._running.popleft()[1]:
                failure = load.failure or self.failure
                if failure is None:
                    done.add(load.request)
                else:
                    failed.append((load, failure))
                if self._claims is not None:
                    self._claims.release(load.ticket)
        if self.failure is not None:
            failed += [(load, self.failure) for load in self.loads]
            self.loads.clear()

    @property
    def has_ended(self) -> bool:
        return self.failure is not None and not self._running

    def close(self) -> None:
        self._thread.join()
        if self.channel is not None:
            # The exporter releases what this connection has claimed.
            _close(self.channel)
        with self._lock:
            self._unmap()


class CacheImporter:
    """Copies blocks of other engines' caches into those of this engine's worker.

    ``caches``, ``blocks`` and ``facts`` as for ``CacheExporter``; ``groups`` are the layers of each group of blocks. All methods but
    ``close`` return at once, and belong to one thread. ``submit`` begins what the methods before it have asked for, and ``poll`` ends it.
    """

    def __init__(
        self, caches: Mapping[str, Any], groups: Sequence[Sequence[str]], blocks: int, facts: Mapping[str, Any], timeout: float = 30.0
    ) -> None:
        self.groups = groups
        self.views = {name: block_views(cache, blocks) for name, cache in caches.items()}
        (device,) = {view.device for views in self.views.values() for view in views}
        self.kind = device.type
        self.device = None if self.kind == "cpu" else str(device)
        self.timeout = timeout
        self._facts = dict(facts)
        self._peers: dict[str, _Peer] = {}
        self._watched: set[_Peer] = set()
        """Those that ``submit`` and ``poll`` look at."""
        self.queue = _native._CopyQueue(self.device)

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raises ``LayoutError`` with the first difference to the facts of another engine."""
        for name in sorted({*self._facts, *facts}):
            here, there = self._facts.get(name), facts.get(name)
            if here != there:
                raise LayoutError(f"the engines differ in {name}: {there!r} there and {here!r} here")

    def claim(self, peer: str, ticket: int) -> None:
        """Makes an exporter keep the blocks of a request until ``load`` has read them, or ``release`` is called."""
        self._peer(peer).change(ticket, True)

    def release(self, peer: str, ticket: int) -> None:
        """Gives blocks up that are not to be read."""
        self._peer(peer).change(ticket, False)

    def load(self, peer: str, load: Load) -> None:
        """Asks for the blocks of a request. ``poll`` names it at the end."""
        self._peer(peer).loads.append(load)

    def submit(self) -> None:
        """Claims and releases what was asked for, and begins the copies from the peers that are connected."""
        for peer in tuple(self._watched):
            peer.begin()

    def poll(self) -> tuple[set[str], list[tuple[Load, str]]]:
        """Returns the requests whose blocks have come, and the loads that have failed with the reasons, each once."""
        done: set[str] = set()
        failed: list[tuple[Load, str]] = []
        for peer in tuple(self._watched):
            if not peer.has_news():
                continue
            # Before the look at its end, which another thread may report from here on.
            self._watched.discard(peer)
            peer.advance(done, failed)
            if peer.has_ended:
                self._forget(peer)
            elif peer.is_busy():
                self._watched.add(peer)
        return done, failed

    def look_at(self, peer: _Peer) -> None:
        """Makes ``poll`` look at a peer. Any thread may call it."""
        self._watched.add(peer)

    def close(self) -> None:
        """Ends all connections."""
        self.queue.synchronize()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _peer(self, name: str) -> _Peer:
        """Returns the connection to an exporter, a new one after the end of the last exporter of this name."""
        peer = self._peers.get(name)
        if peer is not None and not peer.is_busy():
            if peer not in self._watched:
                peer.check()
            if peer.has_ended:
                self._forget(peer)
                peer = None
        if peer is None:
            peer = self._peers[name] = _Peer(self, name)
        self._watched.add(peer)
        return peer

    def _forget(self, peer: _Peer) -> None:
        """Closes the connection to a peer that has ended."""
        if self._peers.get(peer.name) is peer:
            _logger.info("the KV caches of %s are no longer used: %s", peer.name, peer.failure)
            del self._peers[peer.name]
            peer.close()

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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from . import _backends, _native
from . import torch as dt
from ._blocks import BlockCopy
from ._errors import Error, LayoutError, TimeoutError, UnsupportedError
from ._native import _BlockPool as BlockPool
from ._native import _pack_blocks as pack_blocks

__all__ = ["BlockPool", "CacheExporter", "CacheImporter", "Load", "block_views", "pack_blocks"]

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


Part: TypeAlias = "tuple[str, int, bytes]"
"""The blocks of one group of layers: those of the exporter as ``pack_blocks`` writes them, the number of blocks at the beginning of this text
that are not to be read, and the blocks of this engine as ``BlockPool.read`` returns them."""

Load: TypeAlias = "tuple[str, int, Sequence[Part]]"
"""Blocks that are to be copied: the name of their request, its ticket, and the blocks of each group of layers. Tuples, as a request should
cost few calls."""


class _Peer:
    """An exporter's worker. A thread of its own connects, as that takes milliseconds."""

    def __init__(self, importer: CacheImporter, name: str) -> None:
        self._importer = importer
        self.name = name
        self.failure: str | None = None
        self._channel: _native.Channel | None = None
        self._claims: _native._Claims | None = None
        self._reader: _native._BlockReader | None = None
        """Set when everything is ready."""
        self._readable = select.poll()
        self._lock = threading.Lock()
        """Held while copies begin, and while the memory is unmapped: a thread of the library does so when the exporter has ended."""
        self._tensors: dt.Tensors | None = None
        self._changes: list[tuple[int, bool]] = []
        """Tickets to claim (True) or to release (False) when the connection is ready."""
        self.loads: list[Load] = []
        """Those that begin when the connection is ready."""
        self.running = 0
        """The number of copies that have not ended."""
        self._thread = threading.Thread(target=self._connect, name="device-ipc-kv", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        try:
            importer = self._importer
            backend = _backends.of(importer.kind)
            channel = self._channel = _native.connect(self.name, backend=backend, timeout=importer.timeout, existing=True)
            hello = json.loads(channel.receive(timeout=importer.timeout).data)
            if "refused" in hello:
                raise UnsupportedError(f"the other engine has refused: {hello['refused']}")
            importer.check(hello["facts"])
            self._claims = _native._Claims(channel, hello["importer"], importer.timeout)
            self._tensors = tensors = dt.open(hello["caches"], device=importer.device, allow_read_only=True, timeout=importer.timeout)
            copies = []
            for layers in importer.groups:
                sources = []
                for name in layers:
                    if name not in tensors:
                        raise LayoutError(f"the other engine has no layer {name}")
                    sources += block_views(tensors[name], hello["blocks"])
                copies.append(BlockCopy([view for name in layers for view in importer.views[name]], sources)._copy)
            self._readable.register(channel.fileno(), select.POLLIN)
            # Its descriptor is readable when an attempt is worthwhile, after one that was not.
            with contextlib.suppress(TimeoutError):
                channel.receive(timeout=0)
            self._reader = _native._BlockReader(importer.queue, copies, self._claims)
            tensors.mapping.on_gone(self._give_up)
            tensors.mapping.on_dropped(self._give_up)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        self._importer.look_at(self)

    def _give_up(self) -> None:
        """Unmaps the caches of an exporter that has ended. An engine without requests makes no steps, and would keep them for ever."""
        with self._lock:
            self.failure = self.failure or "the other engine has ended"
            if not self.running:
                self._unmap()
        self._importer.look_at(self)

    def _unmap(self) -> None:
        self._reader = None
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            with contextlib.suppress(Error):
                tensors.close()

    def change(self, ticket: int, claims: bool) -> None:
        """Claims or releases a ticket, at once if the connection is ready."""
        if self._reader is None:
            self._changes.append((ticket, claims))
            return
        assert self._claims is not None
        if claims:
            self._claims.claim(ticket)
        else:
            self._claims.release(ticket)

    def check(self) -> None:
        """Notices the exporter's end."""
        if self._reader is None or not self._readable.poll(0):
            return
        assert self._channel is not None
        try:
            self._channel.receive(timeout=0)
        except TimeoutError:
            pass
        except Error as error:
            self.failure = f"{type(error).__name__}: {error}"

    def begin(self, loads: list[Load]) -> None:
        """Claims the tickets of loads, and submits their copies; when the connection is ready, if it is not."""
        with self._lock:
            if self._reader is not None and self.failure is None:
                self._importer.running.append((self._reader.submit(loads), self, loads))
                self.running += 1
                return
        self.loads += loads
        if self.failure is not None:
            self._importer.look_at(self)

    def advance(self, failed: list[tuple[Load, str]]) -> None:
        """Begins what has waited for the connection, or reports it."""
        waiting, self.loads = self.loads, []
        if self.failure is not None:
            failed += [(load, self.failure) for load in waiting]
            return
        changes, self._changes = self._changes, []
        for ticket, claims in changes:
            self.change(ticket, claims)
        if waiting:
            self.begin(waiting)

    @property
    def has_ended(self) -> bool:
        return self.failure is not None and not self.running

    def close(self) -> None:
        self._thread.join()
        if self._channel is not None:
            # The exporter releases what this connection has claimed.
            _close(self._channel)
        with self._lock:
            self._unmap()


class CacheImporter:
    """Copies blocks of other engines' caches into those of this engine's worker.

    ``caches``, ``blocks`` and ``facts`` as for ``CacheExporter``; ``groups`` are the layers of each group of blocks. All methods but
    ``close`` and ``poll`` return at once, and all but ``close`` belong to one thread. ``poll`` ends what the others have begun.
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
        self._changed: set[_Peer] = set()
        """Those whose connection has become ready or has ended since the last ``poll``."""
        self.running: deque[tuple[_native._SubmittedCopies, _Peer, list[Load]]] = deque()
        """Copies in the order of the queue, with the loads that were submitted together."""
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

    def load(self, peer: str, loads: list[Load]) -> None:
        """Copies the blocks of requests, behind the work so far of the current stream. ``poll`` names them at the end."""
        self._peer(peer).begin(loads)

    def poll(self, seconds: float = 0.0) -> tuple[set[str], list[tuple[Load, str]]] | None:
        """Returns the requests whose blocks have come, and the loads that have failed with the reasons, each once; None for nothing.
        Waits for the end of the oldest copy for ``seconds``.

        Before the end of a copy nothing else may write its blocks.
        """
        running, changed = self.running, self._changed
        failures = running[0][0].query(seconds) if running else None
        if failures is None and not changed:
            return None
        done: set[str] = set()
        failed: list[tuple[Load, str]] = []
        while failures is not None:
            _, peer, loads = running.popleft()
            self._end(peer, loads, failures, done, failed)
            failures = running[0][0].query() if running else None
        while changed:
            peer = changed.pop()
            peer.advance(failed)
            if peer.has_ended:
                self._forget(peer)
        return done, failed

    def _end(
        self, peer: _Peer, loads: list[Load], failures: list[tuple[int, str]], done: set[str], failed: list[tuple[Load, str]]
    ) -> None:
        """Reports the loads of copies that have ended."""
        peer.check()
        # Before the look at its end, which another thread may report from here on.
        peer.running -= 1
        reasons = dict(failures)
        for position, load in enumerate(loads):
            reason = reasons[position] if position in reasons else peer.failure
            if reason is None:
                done.add(load[0])
            else:
                failed.append((load, reason))
        if peer.failure is not None:
            self._changed.add(peer)

    def look_at(self, peer: _Peer) -> None:
        """Makes ``poll`` look at a peer. Any thread may call it."""
        self._changed.add(peer)

    def close(self) -> None:
        """Ends all connections."""
        self.queue.synchronize()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _peer(self, name: str) -> _Peer:
        """Returns the connection to an exporter, a new one after the end of the last exporter of this name."""
        peer = self._peers.get(name)
        if peer is not None and not peer.running and not peer.loads:
            peer.check()
            if peer.failure is not None:
                self._forget(peer)
                peer = None
        if peer is None:
            peer = self._peers[name] = _Peer(self, name)
        return peer

    def _forget(self, peer: _Peer) -> None:
        """Closes the connection to a peer that has ended."""
        if self._peers.get(peer.name) is peer:
            _logger.info("the KV caches of %s are no longer used: %s", peer.name, peer.failure)
            del self._peers[peer.name]
            peer.close()

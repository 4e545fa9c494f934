"""A keeper of the processed weights of engines: the first engine of each rank fills a block of its memory, and all engines read it.

Its messages, JSON over a channel:

=======================================  =====================================================================================
an engine                                the keeper
=======================================  =====================================================================================
``{"rank": 0}``                          the answer ``kept``, as soon as there are weights of this rank; or ``{"publish": true}`` to one
                                         engine at a time that may publish, if there are none
``{"manifest", "tensors", "device"}``    ``{"memory": true}`` with one tensor for each of ``tensors`` (name, element type, shape), which the engine
                                         fills; or ``{"error"}``
``{"filled": true}``                     ``kept``: ``{"keeper", "manifest"}``, the keeper's name to open, and the text that came with the tensors
``{"rank": 0, "ranks": 2, "group"}``     ``{"joined": true}``: the process acts together with the other ranks that state the same ``group``
``{"ready": true}``                      ``{"done": true}``, when all ranks have joined and asked: none can miss the end of the group from then on
``{"update": true}``                     ``{"memory": true}`` with another block for the same tensors, or ``{"error"}``. When all ranks have filled theirs, they
                                         are the next version of each, and each rank gets ``kept``
``{"take": true}``                       ``{"descriptor", "manifest", "former"}`` of the present version, when all ranks have asked: the same version for
                                         each. ``former`` is the one before, ``{"descriptor", "grant"}``, or null where no engine has it
``{"taken": true}``                      ``{"done": true}``, when all ranks have taken it
``{"failed": reason}``                   ``{"gone"}`` with the reason, to the other ranks
=======================================  =====================================================================================

When one rank of a group fails, or ends its connection, by its death too, the others receive ``{"gone"}``, the reason, and their connections end: what they
do together has no effect. ``done`` and the ``kept`` of an update come when it has succeeded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import Error, TimeoutError

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger("device_ipc")

ANSWER_LIMIT = 5.0
"""Seconds that an engine may take to make room for an answer; one that takes longer is given up."""

REASON_LIMIT = 1000
"""Characters of the reason of a rank that are passed on."""

TAKE_LIMIT = 60.0
"""Seconds for which a rank can return to the former version, after all ranks have asked for the present one."""


def channel(name: str, publishes: bool) -> str:
    """Returns the name of the keeper's channel for engines that publish, or of that for the others."""
    return f"{'publish' if publishes else 'weights'}.{name}"


class WeightKeeper:
    """Keeps the processed weights of engines in device memory of this process, one block for each rank.

    ``name`` is that of the keeper: engines find it as ``keeper:NAME``, and the weights of a rank R > 0 are ``keeper:NAME.R``. The first engine
    that may publish fills the block of its rank; then the keeper shares it read-only. ``allow_users`` are further user ids whose engines may
    read; only engines of this process's user can publish. A thread of its own answers. Raises as ``device_ipc.listen``.

    As a context manager, it is closed at the end of the block.
    """

    def __init__(self, name: str, *, allow_users: Sequence[int] | None = None) -> None:
        self._name = name
        self._allow_users = allow_users
        self._parts: dict[int, _Part] = {}
        self._groups: dict[str, _Group] = {}
        self._engines: set[_Engine] = set()
        self._selector = selectors.DefaultSelector()
        self._listeners = [
            _native.listen(channel(name, publishes=False), allow_users=allow_users),
            _native.listen(channel(name, publishes=True)),
        ]
        for listener, publishes in zip(self._listeners, (False, True), strict=True):
            self._selector.register(listener.fileno(), selectors.EVENT_READ, (listener, publishes))
        self._end, self._stop = os.pipe()
        os.set_blocking(self._stop, False)
        self._stop_lock = threading.Lock()
        self._is_closed = False
        self._selector.register(self._end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="device-ipc-weights", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The name that engines look for."""
        return self._name

    @property
    def exports(self) -> list[_native.Export]:
        """The exports of the ranks whose weights are kept, in the order of the ranks."""
        return [part.export for _, part in sorted(self._parts.items()) if part.export is not None]

    def close(self) -> None:
        """Ends the keeper. Engines that have the weights open keep them where mappings outlive the exporter (CUDA, the mock)."""
        self._is_closed = True
        self._notify()
        self._thread.join()
        with self._stop_lock:
            if self._stop >= 0:
                os.close(self._stop)
                self._stop = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _notify(self) -> None:
        """Wakes the thread of the keeper, if it runs and has not been woken already."""
        with self._stop_lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._stop >= 0:
                os.write(self._stop, b"\0")

    def _serve(self) -> None:
        with self._selector as selector:
            running = True
            while running:
                for key, _ in selector.select():
                    if key.data is None:
                        os.read(self._end, 4096)
                        running = not self._is_closed
                        self._free_former()
                    elif isinstance(key.data, _Engine):
                        self._receive(key.data)
                    else:
                        self._accept(*key.data)
        os.close(self._end)
        for listener in self._listeners:
            listener.close()
        for engine in list(self._engines):
            engine.close()
        for part in self._parts.values():
            part.close()

    def _accept(self, listener: _native.Listener, publishes: bool) -> None:
        try:
            engine = _Engine(listener.accept(0), publishes)
        except (Error, OSError):
            return
        self._engines.add(engine)
        self._selector.register(engine.channel.fileno(), selectors.EVENT_READ, engine)
        self._receive(engine)

    def _receive(self, engine: _Engine) -> None:
        """Answers the messages that have arrived."""
        while engine in self._engines:
            try:
                message = engine.channel.receive(0)
            except TimeoutError:
                return
            except (Error, OSError, ValueError):
                if engine.former is not None:
                    engine.former.give_back()
                self._leave(engine)
                return
            try:
                self._answer(engine, json.loads(message.data))
            except (Error, OSError, ValueError, TypeError, KeyError) as error:
                _logger.warning("the keeper %s refuses process %s: %s", self._name, engine.channel.peer, error)
                engine.tell({"error": str(error)})
                self._leave(engine)

    def _answer(self, engine: _Engine, request: dict[str, Any]) -> None:
        if "rank" in request:
            if engine.rank is not None:
                raise ValueError("this process has stated its rank already")
            engine.rank = int(request["rank"])
            if "group" in request:
                self._join(engine, str(request["group"]), int(request["ranks"]))
                return
            self._parts.setdefault(engine.rank, _Part()).waiting.append(engine)
            self._turn(engine.rank)
            return
        part = self._parts.get(-1 if engine.rank is None else engine.rank)
        group = engine.group
        if group is not None and "update" in request:
            self._update(engine, part)
        elif group is not None and "failed" in request:
            assert engine.rank is not None
            del group.members[engine.rank]
            self._dissolve(group, f"rank {engine.rank} has failed: {str(request['failed'])[:REASON_LIMIT]}")
            self._leave(engine)
        elif group is not None and (step := next((one for one in ("ready", "take", "taken") if one in request), "")):
            self._together(group, engine, step)
        elif part is None or part.publisher is not engine:
            raise ValueError("this process is not the one that publishes the weights of this rank")
        elif "tensors" in request:
            names = [str(name) for name, _, _ in request["tensors"]]
            layouts = [([int(size) for size in shape], str(dtype)) for _, dtype, shape in request["tensors"]]
            part.manifest, part.names, part.layouts = str(request["manifest"]), names, layouts
            part.device = _device(str(request["device"]))
            part.allocate()
        elif "filled" not in request or part.memory is None:
            raise ValueError(f"the request has no known key: {sorted(request)}")
        elif group is not None:
            self._together(group, engine, "filled")
        else:
            assert engine.rank is not None
            self._take_over([engine.rank])

    def _join(self, engine: _Engine, name: str, ranks: int) -> None:
        """Adds an engine to the group of its ranks."""
        assert engine.rank is not None
        # Other users, who may read, cannot end what engines of this one do.
        name = f"{_user(engine.channel.peer)}/{name}"
        group = self._groups.get(name)
        if group is not None and engine.rank in group.members:
            # It has begun again, and the end of its former connection has not arrived.
            self._dissolve(group, f"rank {engine.rank} has begun again")
            group = None
        if not 0 <= engine.rank < ranks or (group is not None and group.ranks != ranks):
            raise ValueError(f"rank {engine.rank} is none of {ranks}, or another rank has stated another number of ranks")
        if group is None:
            group = self._groups[name] = _Group(name, ranks)
        group.members[engine.rank] = engine
        engine.group = group
        engine.tell({"joined": True})

    def _together(self, group: _Group, engine: _Engine, step: str) -> None:
        """Carries out a step of a group, once all of its ranks have asked for it."""
        assert engine.rank is not None
        group.steps[engine.rank] = step
        if len(group.steps) < group.ranks:
            return
        if len(set(group.steps.values())) > 1:
            self._dissolve(group, f"its ranks do not do the same: {group.steps}")
            return
        group.steps.clear()
        if step == "filled":
            self._take_over(range(group.ranks))
        elif step == "take":
            parts = [part for rank in range(group.ranks) if (part := self._parts.get(rank)) is not None]
            # They can be opened by their descriptors until all ranks have done so.
            group.exports = [part.export for part in parts if part.export is not None]
            if len(group.exports) < group.ranks:
                self._dissolve(group, "there are no weights of all of its ranks")
                return
            for rank, (part, export) in enumerate(zip(parts, group.exports, strict=True)):
                group.members[rank].take(export, part)
        else:
            group.exports.clear()
            for member in group.members.values():
                member.tell({"done": True})

    def _update(self, engine: _Engine, part: _Part | None) -> None:
        """Gives an engine memory for the next version of its rank."""
        if not engine.publishes:
            raise ValueError("this process may only read the weights")
        if part is None or part.keeper is None:
            raise ValueError("there are no weights of this rank to update yet")
        for other in self._parts.values():
            if other.publisher is not None and (other is part or other.publisher.group is not engine.group):
                raise ValueError(f"process {other.publisher.channel.peer} updates the weights already")
        part.publisher = engine
        part.allocate()

    def _take_over(self, ranks: Sequence[int]) -> None:
        """Shares what was filled."""
        parts = [self._parts[rank] for rank in ranks]
        exports = [_native.share(part.memory, access="r", allow_users=self._allow_users) for part in parts]
        for rank, export in zip(ranks, exports, strict=True):
            part = self._parts[rank]
            part.former, part.export, part.memory = part.export, export, None
            if part.former is not None:
                part.former.on_change(self._notify)
            if part.keeper is None:
                name = self._name if rank == 0 else f"{self._name}.{rank}"
                part.keeper = _native.keep(name, export, allow_users=self._allow_users)
            else:
                part.keeper.replace(export)
            assert part.publisher is not None
            part.waiting.append(part.publisher)
            part.publisher = None
        self._free_former()
        for rank in ranks:
            self._turn(rank)

    def _free_former(self) -> None:
        """Frees the versions before the present ones that no engine has any longer."""
        for part in self._parts.values():
            if part.former is not None and not part.former.holders():
                part.former = None

    def _turn(self, rank: int) -> None:
        """Answers the engines that wait for this rank, or has one of them publish."""
        part = self._parts[rank]
        if part.keeper is not None:
            kept = {"keeper": part.keeper.name, "manifest": part.manifest}
            waiting, part.waiting = part.waiting, []
            for engine in waiting:
                engine.tell(kept)
        elif part.publisher is None:
            part.publisher = next((engine for engine in part.waiting if engine.publishes), None)
            if part.publisher is not None:
                part.waiting.remove(part.publisher)
                part.publisher.tell({"publish": True})

    def _leave(self, engine: _Engine) -> None:
        """Forgets an engine that has gone. Memory that it has not filled is freed, and the next one publishes."""
        if engine not in self._engines:
            return
        self._engines.remove(engine)
        self._selector.unregister(engine.fileno)
        engine.close()
        if engine.group is not None:
            self._dissolve(engine.group, f"process {engine.channel.peer}, which has rank {engine.rank}, has ended")
        part = self._parts.get(-1 if engine.rank is None else engine.rank)
        if part is None:
            return
        if engine in part.waiting:
            part.waiting.remove(engine)
        if part.publisher is engine:
            part.publisher = part.memory = None
            if part.keeper is None:
                part.manifest = ""
            assert engine.rank is not None
            self._turn(engine.rank)

    def _dissolve(self, group: _Group, reason: str) -> None:
        """Ends what the ranks of a group do together: no rank gets a version that the others do not get."""
        if self._groups.get(group.name) is group:
            del self._groups[group.name]
        members, group.members = group.members, {}
        for member in members.values():
            if member in self._engines:
                member.tell({"gone": reason})
                self._leave(member)


@dataclass(eq=False)
class _Engine:
    """A process that asks."""

    channel: _native.Channel
    publishes: bool
    rank: int | None = None
    group: _Group | None = None
    """The ranks with which it acts together; None for the first version."""
    former: _native.Grant | None = None
    """Its right to return to the former version when another rank fails. It ends with its process."""
    fileno: int = field(init=False)

    def __post_init__(self) -> None:
        self.fileno = self.channel.fileno()

    def tell(self, answer: dict[str, Any]) -> None:
        """Answers. An engine that has gone, or reads nothing, is noticed when its channel ends."""
        try:
            self.channel.send(json.dumps(answer).encode(), timeout=ANSWER_LIMIT)
        except (Error, OSError, ValueError) as error:
            _logger.warning("process %s does not take the keeper's answer: %s", self.channel.peer, error)

    def take(self, export: _native.Export, part: _Part) -> None:
        """Names the present version of its rank, and the former one."""
        former = None
        if part.former is not None:
            self.former = part.former.grant(TAKE_LIMIT)
            former = {"descriptor": str(part.former.descriptor), "grant": str(self.former)}
        self.tell({"descriptor": str(export.descriptor), "manifest": part.manifest, "former": former})

    def close(self) -> None:
        """Ends the channel, without a wait for the engine to take the last answer."""
        with contextlib.suppress(Error):
            self.channel.close(timeout=0)


@dataclass(eq=False)
class _Group:
    """The ranks of one engine, while they publish or take a version."""

    name: str
    ranks: int
    members: dict[int, _Engine] = field(default_factory=dict)
    steps: dict[int, str] = field(default_factory=dict)
    """What each rank has asked for, until all have."""
    exports: list[_native.Export] = field(default_factory=list)
    """The version that they take."""


@dataclass(eq=False)
class _Part:
    """The weights of one rank."""

    waiting: list[_Engine] = field(default_factory=list)
    publisher: _Engine | None = None
    """The engine that loads these weights now."""
    manifest: str = ""
    names: list[str] = field(default_factory=list)
    layouts: list[tuple[list[int], str]] = field(default_factory=list)
    device: str = ""
    memory: dict[str, _native.Tensor] | None = None
    """What the publisher fills."""
    export: _native.Export | None = None
    former: _native.Export | None = None
    """The version before that one, as long as an engine has it."""
    keeper: _native.Keeper | None = None

    def allocate(self) -> None:
        """Allocates memory for the publisher, which engines can open read-only, and sends it."""
        assert self.publisher is not None
        blocks = _native._empty_block(self.layouts, self.device, True)
        self.memory = dict(zip(self.names, blocks, strict=True))
        self.publisher.channel.send(b'{"memory": true}', self.memory, timeout=ANSWER_LIMIT)

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
        self.former = None
        if self.export is not None:
            # Those that use the weights are notified, and release them when they like.
            with contextlib.suppress(Error):
                self.export.close(timeout=0)


def _user(process: int) -> int:
    """Returns the effective user of a process; -1 if it has ended, or is in another namespace."""
    try:
        with open(f"/proc/{process}/status") as status:
            return next(int(line.split()[2]) for line in status if line.startswith("Uid:"))
    except OSError:
        return -1


def _device(uuid: str) -> str:
    """Returns the name of a device in this process."""
    for device in _native.devices():
        if device.uuid == uuid:
            return device.device
    raise ValueError(f"the keeper's process has no device {uuid}; start it with the same devices visible")

"""Models whose parameters are the memory of a keeper of processed weights: one copy for all engines of a rank.

The first engine loads as usual and publishes its parameters as it has processed them. Another one builds the model with its parameters on
PyTorch's meta device, processes them there, which moves no bytes, and then takes the published ones. What is not computed from the
weights, such as scratch memory and tables of positions, stays its own. The loaders of each kind of engine are beside its other parts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _backends, _native
from . import torch as dt
from ._errors import Error, GoneError, LayoutError, TimeoutError, UnsupportedError
from ._manifest import IN_PLACE, Manifest
from ._recorded import is_in
from ._weight_keeper import channel

if TYPE_CHECKING:
    from typing_extensions import Self

SMALL = 4096
"""Tensors of fewer bytes are real in a model that is built on the meta device: they are scales and the like, which Python reads."""

CONNECT_LIMIT = 10.0
"""Seconds in which a keeper that an engine has found before has to accept a connection."""


@dataclass(frozen=True)
class Place:
    """Where a module has a tensor."""

    module: torch.nn.Module
    kind: str
    """``_parameters``, ``_buffers`` or ``__dict__``."""
    name: str

    def set(self, tensor: torch.Tensor) -> None:
        """Puts another tensor there."""
        getattr(self.module, self.kind)[self.name] = tensor


@dataclass(frozen=True)
class Held:
    """A tensor of a model, with all places that have it."""

    tensor: torch.Tensor
    places: list[Place]

    @property
    def is_parameter(self) -> bool:
        """Whether the first place is that of a parameter."""
        return self.places[0].kind == "_parameters"

    @property
    def layout(self) -> list[Any]:
        """Element type, shape and strides, as JSON has them."""
        return [str(self.tensor.dtype).removeprefix("torch."), list(self.tensor.shape), list(self.tensor.stride())]

    def set(self, tensor: torch.Tensor) -> None:
        """Puts another tensor in all places."""
        for place in self.places:
            place.set(tensor)


def held(model: torch.nn.Module, device: torch.device) -> dict[str, Held]:
    """Returns the parameters, buffers and attributes of a model that are tensors of the device or of the meta device, by their first names."""
    found: dict[int, tuple[str, Held]] = {}
    for prefix, module in model.named_modules():
        for kind in ("_parameters", "_buffers", "__dict__"):
            for name, tensor in getattr(module, kind).items():
                if isinstance(tensor, torch.Tensor) and tensor.numel() and (tensor.is_meta or tensor.device == device):
                    one = found.setdefault(id(tensor), (f"{prefix}.{name}".lstrip("."), Held(tensor, [])))[1]
                    one.places.append(Place(module, kind, name))
    return dict(found.values())


def floats(model: torch.nn.Module) -> dict[str, float | str]:
    """Returns the numbers that modules keep in Python, such as scales: the processing may have computed them from the weights."""
    found: dict[str, float | str] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is float:
                # JSON has neither infinities nor NaN.
                found[f"{prefix}.{name}"] = value if math.isfinite(value) else repr(value)
    return found


@dataclass(frozen=True)
class Published:
    """What engines of a manifest have to agree in, as the keeper passes it on."""

    manifest: Manifest
    tensors: dict[str, list[Any]]
    """Element type, shape and strides of each tensor."""
    floats: dict[str, float | str]

    @classmethod
    def parse(cls, text: str, kind: type[Manifest]) -> Published:
        """Returns what an engine has published whose manifest is of a kind. Raises ``LayoutError`` for another text."""
        try:
            values = json.loads(text)
            published = cls(kind.parse(values.pop("manifest")), **values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LayoutError(f"the keeper's weights were not published by this package: {error}") from None
        return published


@dataclass(frozen=True)
class Options:
    """What ``model_loader_extra_config`` has for the load format ``device_ipc``."""

    source: str
    timeout: float = 300.0
    in_place: bool = False
    publish: bool = False
    load_format: str = "auto"
    """Of the weights that an engine may have to publish."""

    @classmethod
    def parse(cls, values: Any) -> Options:
        """Returns the options that a dict has. Raises ``ValueError`` for others."""
        values = dict(values or {})
        if not isinstance(values.get("source"), str):
            raise ValueError("""--load-format device_ipc needs --model-loader-extra-config '{"source": "keeper:NAME"}'""")
        unknown = sorted(set(values) - {one.name for one in fields(cls)})
        if unknown:
            raise ValueError(
                f"model_loader_extra_config has unknown keys: {unknown}; permitted are source, timeout, in_place, publish and load_format"
            )
        options = cls(**values)
        if options.publish and not options.in_place:
            raise ValueError('model_loader_extra_config has "publish", which needs "in_place": true')
        if options.in_place:
            Address.parse(options.source)
        return options


@dataclass(frozen=True)
class Address:
    """The keeper's name, and its user if that is another one than the engine's."""

    name: str
    user: int | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Returns the address of ``keeper:NAME`` or ``keeper:UID/NAME``. Raises ``ValueError`` for another text."""
        user, slash, name = text.removeprefix("keeper:").rpartition("/")
        if not text.startswith("keeper:") or not name or bool(slash) != user.isdecimal():
            raise ValueError(f'"in_place" needs a source "keeper:NAME" or "keeper:UID/NAME", and not {text!r}')
        return cls(name, int(user) if user and int(user) != os.geteuid() else None)

    @property
    def users(self) -> list[int]:
        """The users that are permitted beside this one."""
        return [] if self.user is None else [self.user]

    def open(self, name: str, **options: Any) -> dt.Tensors:
        """Opens what the keeper keeps under a name."""
        text = f"keeper:{name}" if self.user is None else f"keeper:{self.user}/{name}"
        return dt.open(text, allow_users=self.users, **options)


class Source:
    """A connection to the keeper of the weights."""

    def __init__(self, address: Address, publishes: bool, timeout: float, connect_timeout: float | None = None) -> None:
        self.address, self.timeout = address, timeout
        limit = timeout if connect_timeout is None else min(timeout, connect_timeout)
        name = channel(address.name, publishes)
        self._channel = _native.connect(name, timeout=limit, user=address.user, allow_users=address.users)

    @classmethod
    def of(cls, options: Options) -> Source:
        """Returns the connection of an engine that loads its weights."""
        return cls(Address.parse(options.source), options.publish, options.timeout)

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], _native.Received]:
        """Sends a request, and returns the answer."""
        try:
            with contextlib.suppress(GoneError):
                # What the keeper has said before its end is received first.
                self._channel.send(json.dumps(request).encode(), timeout=self.timeout)
            message = self._channel.receive(self.timeout)
        except TimeoutError:
            raise TimeoutError(self._late(request)) from None
        except GoneError:
            raise GoneError(f"the keeper {self.address.name!r} has ended; start it again, then the engine") from None
        answer: dict[str, Any] = json.loads(message.data)
        if "gone" in answer:
            raise GoneError(f"the ranks of this engine do nothing, since one has left: {answer['gone']}")
        if "error" in answer:
            raise LayoutError(f"the keeper {self.address.name!r} refuses: {answer['error']}")
        return answer, message

    def _late(self, request: dict[str, Any]) -> str:
        if "rank" in request and "group" not in request:
            return (
                f"the keeper {self.address.name!r} has had no weights of this rank for {self.timeout} s; start one engine with "
                '"publish": true, or raise "timeout"'
            )
        return f"the keeper {self.address.name!r} or another rank has not answered within {self.timeout} s"

    def close(self) -> None:
        """Ends the connection. A keeper that waits for this engine's weights has the next engine publish."""
        with contextlib.suppress(Error):
            self._channel.close(timeout=0)

    def publish(self, manifest: Manifest, model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
        """Copies the tensors of a loaded model to the keeper's memory; returns the answer."""
        tensors = held(model, device)
        layouts = {name: one.layout for name, one in tensors.items()}
        text = json.dumps({"manifest": asdict(manifest), "tensors": layouts, "floats": floats(model)})
        flat = {name: _flat(name, one.tensor) for name, one in tensors.items()}
        sizes = [[name, "uint8", [one.numel()]] for name, one in flat.items()]
        _, message = self.ask({"manifest": text, "tensors": sizes, "device": described(device).uuid})
        with dt.Tensors(message.open(device=device, access="rw", timeout=self.timeout)) as memory:
            for name, one in flat.items():
                memory[name].copy_(one)
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        return self.ask({"filled": True})[0]


def load(
    source: Source,
    manifest: Manifest,
    device: torch.device,
    load_normally: Callable[[], torch.nn.Module],
    load_without_weights: Callable[[Unfilled], torch.nn.Module],
    group: str,
    logger: logging.Logger,
) -> torch.nn.Module:
    """Returns a model whose parameters are the keeper's memory.

    ``load_normally`` loads it as without a keeper, for the engine that publishes. ``load_without_weights`` does the same in the context of its
    argument, and calls its ``fill`` in place of loading the weights. ``group`` is a text that the ranks of the engine have in common.
    ``logger`` is the engine's.
    """
    answer, _ = source.ask({"rank": manifest.rank})
    publishes = "publish" in answer
    if publishes:
        model = load_normally()
        answer = source.publish(manifest, model, device)
    published = Published.parse(answer["manifest"], type(manifest))
    manifest.check(published.manifest)
    if not publishes:
        model = _without_weights(Unfilled(device), load_without_weights)
    _compare(model, published, device)
    begin = time.perf_counter()
    # The engine only reads. At reserved addresses a new version takes the place of this one.
    weights = source.address.open(answer["keeper"], device=device, timeout=source.timeout, allow_read_only=True, reserved=True)
    with torch.no_grad():
        for name, one in held(model, device).items():
            kept = _view(weights[name], *published.tensors[name])
            if one.is_parameter or one.tensor.is_meta:
                one.set(_alike(one.tensor, kept))
            elif not publishes:
                one.tensor.copy_(kept)
    in_place = InPlace(weights, published, answer["manifest"], source.address, source.timeout, group)
    setattr(model, IN_PLACE, in_place)
    MODELS.add(in_place)
    took = (time.perf_counter() - begin) * 1000
    logger.info("device_ipc: %.2f GB of %s in place in %.0f ms", weights.mapping.nbytes / 1e9, source.address.name, took)
    return model


@dataclass(frozen=True, eq=False)
class InPlace:
    """What a model in place knows of its keeper."""

    weights: dt.Tensors
    """The memory of the parameters."""
    published: Published
    text: str
    """What ``published`` was parsed from."""
    address: Address
    timeout: float
    group: str
    """What the ranks of the engine have in common."""

    @property
    def block(self) -> torch.Tensor:
        """All bytes of the memory."""
        return _block(self.weights)

    @property
    def is_suspended(self) -> bool:
        """Whether the engine sleeps: there is no memory at the addresses of the parameters."""
        return self.weights.mapping.is_suspended

    def is_named(self, source: str) -> bool:
        """Returns whether the source of an update is the keeper of the weights."""
        try:
            return Address.parse(source) == self.address
        except ValueError:
            return False

    def together(self, purpose: str = "") -> Together:
        """Returns a connection of this rank and the others of the engine, which act as one through the keeper. ``purpose`` keeps those for
        different purposes apart."""
        return Together(self, f"{self.group} {purpose}")

    def suspend(self) -> None:
        """Returns the memory, and keeps the addresses."""
        self.weights.mapping.suspend()

    def take(self, ranks: Together) -> None:
        """Maps the present version of the weights at the addresses of the parameters, when all ranks are here, and the same version for all.

        If another rank fails, this one has its former version again, or none if it was suspended, and ``GoneError`` is raised. A rank that
        had a version before that of the other engines cannot go back, and keeps the present one.
        """
        answer = ranks.ask({"take": True})[0]
        former = answer["former"]
        try:
            self._check(answer["manifest"])
            self._take(ranks, answer["descriptor"], former)
        finally:
            if former is not None:
                _native.Grant(former["grant"]).give_back()

    def _take(self, ranks: Together, descriptor: str, former: dict[str, str] | None) -> None:
        mapping, was_suspended = self.weights.mapping, self.is_suspended
        present = "" if was_suspended else str(mapping.descriptor)
        if was_suspended:
            mapping.resume(descriptor)
        elif present != descriptor:
            if not _backends.is_host(mapping.devices[0]):
                # Nothing may read what is exchanged.
                torch.accelerator.synchronize()
            mapping.replace(descriptor)
        try:
            ranks.ask({"taken": True})
        except BaseException:
            if was_suspended:
                mapping.suspend()
            elif present != descriptor and former is not None and former["descriptor"] == present:
                mapping.replace(present, grant=former["grant"])
            raise

    def _check(self, text: str) -> None:
        """Raises ``LayoutError`` if the weights of a keeper, which may be another one by now, are not those of this model."""
        if text == self.text:
            return
        present = Published.parse(text, type(self.published.manifest))
        self.published.manifest.check(present.manifest)
        if present != self.published:
            raise LayoutError(f"the keeper {self.address.name!r} has weights that were processed in another way; start the engine again")


MODELS: weakref.WeakSet[InPlace] = weakref.WeakSet()
"""The models in place of this process."""


class Together(Source):
    """A connection of one rank, by which the keeper has all ranks of an engine act as one. It ends for all when it ends for one."""

    def __init__(self, model: InPlace, group: str) -> None:
        manifest = model.published.manifest
        try:
            # Engines of other users than the keeper's only read.
            super().__init__(model.address, model.address.user is None, model.timeout, CONNECT_LIMIT)
        except TimeoutError as error:
            raise GoneError(f"the keeper {model.address.name!r} does not run: {error}") from None
        self.ask({"rank": manifest.rank, "ranks": manifest.ranks, "group": group})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def fail(self, error: BaseException) -> None:
        """Reports what has failed here. The other ranks name it in their exceptions."""
        with contextlib.suppress(Error):
            self._channel.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode(), timeout=CONNECT_LIMIT)


class Update:
    """The next version of the weights of a model in place: memory of the keeper that no engine reads yet.

    Unless it is published, its end undoes what a load by the engine has made of the model's tensors.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, ranks: Together) -> None:
        in_place: InPlace = getattr(model, IN_PLACE)
        self._device, self._ranks, self._layouts = device, ranks, in_place.published.tensors
        # What an engine adds to its modules later, such as its KV cache, is not of the weights.
        found = {name: one for name, one in held(model, device).items() if name in self._layouts}
        block = in_place.block
        self._kept = {name: one for name, one in found.items() if is_in(one.tensor, block.data_ptr(), block)}
        self._own = {name: one for name, one in found.items() if name not in self._kept}
        _, message = ranks.ask({"update": True})
        self._memory = dt.Tensors(message.open(device=device, access="rw", timeout=in_place.timeout))
        self._former: list[tuple[Held, torch.Tensor, torch.Tensor | None]] = []
        """The tensors of the model during a load by the engine, with the contents of its own ones."""
        with torch.no_grad():
            for name, one in self._kept.items():
                if not one.is_parameter:
                    # No load has to write it.
                    self._memory[name].copy_(_flat(name, one.tensor))

    @property
    def block(self) -> torch.Tensor:
        """All bytes of the memory."""
        return _block(self._memory)

    def lend(self) -> None:
        """Makes the memory that of the tensors in place, for a load by the engine."""
        for name, one in self._kept.items():
            self._former.append((one, one.tensor, None))
            one.set(_alike(one.tensor, _view(self._memory[name], *self._layouts[name])))
        self._former += [(one, one.tensor, one.tensor.detach().clone()) for one in self._own.values()]

    def take_back(self) -> None:
        """Gives the tensors in place their former memory, which the engine reads until it follows."""
        for one, tensor, contents in self._former:
            if contents is None:
                one.set(tensor)

    def publish(self) -> None:
        """Has the keeper share the memory as the next version, once all ranks have filled theirs."""
        with torch.no_grad():
            for name, one in self._own.items():
                # For engines that start later.
                self._memory[name].copy_(_flat(name, one.tensor))
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
        self._memory.close()
        self._ranks.ask({"filled": True})
        self._former.clear()

    def close(self) -> None:
        """Gives the update up, unless it is published."""
        with torch.no_grad():
            for one, tensor, contents in self._former:
                one.set(tensor)
                if contents is not None:
                    tensor.copy_(contents)
        self._former.clear()
        with contextlib.suppress(Error):
            self._memory.close()


class Unfilled(TorchDispatchMode):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """While a model is built, has ``torch.empty`` make tensors of a device on the meta device, except small ones."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._device = device
        self._is_built = False

    def fill(self, model: torch.nn.Module) -> None:
        """Ends that. Tensors of the built model other than parameters, which a forward may write, get memory of their own."""
        self._is_built = True
        for one in held(model, self._device).values():
            if one.tensor.is_meta and not one.is_parameter:
                one.set(_alike(one.tensor, torch.empty_like(one.tensor, device=self._device)))

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if not self._is_built and function is torch.ops.aten.empty.memory_format:
            dtype = options.get("dtype") or torch.get_default_dtype()
            is_here = torch.device(options.get("device") or "cpu").type == self._device.type
            if is_here and math.prod(arguments[0]) * dtype.itemsize >= SMALL:
                options.update(device="meta", pin_memory=False)
        return function(*arguments, **options)


def _without_weights(unfilled: Unfilled, load: Callable[[Unfilled], torch.nn.Module]) -> torch.nn.Module:
    """Returns a model whose large parameters, and what the engine computes of them, are on the meta device."""
    try:
        with unfilled:
            model = load(unfilled)
    except RuntimeError as error:
        raise UnsupportedError(f"the engine cannot build this model without its weights ({error}); load it without in_place") from error
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and not isinstance(value, torch.Tensor) and _has_meta(value, 3):
                raise UnsupportedError(f"{prefix}.{name} has a tensor computed from the weights, which no name reaches; load without in_place")
    return model


def _has_meta(value: Any, depth: int) -> bool:
    """Returns whether an object, or one that it names, is a tensor on the meta device."""
    if isinstance(value, torch.Tensor):
        return bool(value.is_meta)
    if depth == 0 or isinstance(value, (torch.nn.Module, type)):
        return False
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return any(_has_meta(one, depth - 1) for one in inner)


def _compare(model: torch.nn.Module, published: Published, device: torch.device) -> None:
    """Raises ``LayoutError``, which names the first difference, if a model has other tensors or numbers than the published one."""
    layouts = {name: one.layout for name, one in held(model, device).items()}
    for what, here, there in (("tensor", layouts, published.tensors), ("number", floats(model), published.floats)):
        for name in {**there, **here}:
            if here.get(name) != there.get(name):
                raise LayoutError(
                    f"the {what} {name} of the kept weights is {there.get(name, 'absent')}, and in this engine {here.get(name, 'absent')}: "
                    "the weights were processed in another way; load without in_place"
                )


def _block(memory: dt.Tensors) -> torch.Tensor:
    """Returns the bytes of memory that is one block."""
    block: torch.Tensor = torch.from_dlpack(memory.mapping.regions[0])  # type: ignore[attr-defined]
    return block


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor in the order of its memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            raise UnsupportedError(f"the tensor {name} has gaps (strides {tuple(tensor.stride())}); load without in_place")
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _view(memory: torch.Tensor, dtype: str, shape: list[int], strides: list[int]) -> torch.Tensor:
    """Returns the tensor in bytes of ``_flat``."""
    return memory.view(dt._dtype(torch, dtype)).as_strided(shape, strides)


def _alike(old: torch.Tensor, contents: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the class and with the attributes of another one."""
    if type(old) is torch.Tensor:
        return contents
    new: torch.Tensor = torch.Tensor._make_subclass(type(old), contents, False)
    vars(new).update(vars(old))
    return new


def described(device: torch.device) -> _native.Device:
    """Returns what this library knows of a device: its identity, by which another process finds it under its own number, and its name."""
    for one in _native.devices():
        kind, _, number = one.device.partition(":")
        if int(number) == (device.index or 0) and (_backends.is_host(one.device) if device.type == "cpu" else kind == device.type):
            return one
    raise UnsupportedError(f"no backend has the device {device}")

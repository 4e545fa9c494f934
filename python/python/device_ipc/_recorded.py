"""Loads of weights that are recorded once and then replayed as copies.

A framework's load of a checkpoint is Python for each tensor: loaders fuse, slice and cast. Which part of which tensor arrives in which
part of which parameter does not change from one load to the next. A ``Recording`` watches a load by PyTorch's dispatch mode and follows
copies through temporary tensors; its ``Plan`` repeats their effect by one copy for each part.

A plan exists only if every byte of every parameter came from one copy (which may change the element type) or one constant, if nothing else
that the load has made of the tensors outlives it, and if the bytes of the parameters were those of the tensors when they were written.
Else ``NotCopiesError`` gives the reason, as for values that are computed (quantisation). Kernels that are launched past PyTorch, and
threads that the load starts, are not seen; a parameter that they alone write counts as not written.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import gc
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

MAX_RUNS = 1 << 22
"""The number of separate runs of bytes in one storage above which a load is not recorded."""

MAX_PLANS = 256
"""The number of layouts of loads of one module that are remembered: an update may be many loads, of some of the tensors each."""

MAX_UNUSED = 3
"""The number of plans in a row that no load has used after which a load is no longer recorded, which takes longer than the load."""

LOADS = "device_ipc_loads"
"""The name of a module's attribute that has its recorded loads."""

REPLAY = "DEVICE_IPC_REPLAY_LOADS"
"""The environment variable that is ``0`` in a process that loads all weights in the normal way."""

_logger = logging.getLogger(__name__)
_aten: Any = torch.ops.aten
_CLONES = (_aten.clone.default, _aten._to_copy.default)
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)
_BITS: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotCopiesError(Exception):
    """A load is not only copies; the text says what it did instead."""


class Source(NamedTuple):
    """A tensor that the load receives: the ``number``-th of a ``part`` of the recording."""

    part: int
    number: int


class Fill(NamedTuple):
    """A constant."""

    value: Any


class Other(NamedTuple):
    """Bytes whose origin is not known, and the reason."""

    reason: str


class Write(NamedTuple):
    """Bytes of a storage, as they were written last. Offsets and strides are in bytes."""

    offset: int
    dims: tuple[tuple[int, int, int], ...]
    """Sizes, strides in the storage, and strides in the source, in descending order of the strides in the storage."""
    dtype: Any
    origin: Source | Fill | Other
    source_offset: int = 0
    """From the first byte of the source."""
    source_dtype: Any = None

    def extent(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Returns the offset, and the sizes and strides of the written bytes, of which equal sets are equal; the last is a run of bytes."""
        merged = [(self.dtype.itemsize, 1)]
        for size, stride, _ in reversed(self.dims):
            count, unit = merged[-1]
            if stride == count * unit:
                merged[-1] = (count * size, unit)
            else:
                merged.append((size, stride))
        return self.offset, tuple(reversed(merged))

    @property
    def nbytes(self) -> int:
        number = int(self.dtype.itemsize)
        for size, _, _ in self.dims:
            number *= size
        return number

    def replaces(self, other: Write) -> bool:
        """Returns whether all bytes of another write are among these."""
        (offset, dims), (begin, others) = self.extent(), other.extent()
        if (offset, dims) == (begin, others):
            return True
        end = begin + sum((size - 1) * stride for size, stride in others) + 1
        return len(dims) == 1 and offset <= begin and end <= offset + dims[0][0]

    def runs(self) -> tuple[Any, int]:
        """Returns the offsets of all runs of bytes, and their length."""
        offset, dims = self.extent()
        starts = torch.tensor([offset])
        for size, stride in dims[:-1]:
            if starts.numel() * size > MAX_RUNS:
                raise NotCopiesError(f"more than {MAX_RUNS} separate parts of a tensor are written")
            starts = (starts[:, None] + torch.arange(size) * stride).reshape(-1)
        return starts, dims[-1][0]


def _dims(target: Any, source: Any = None) -> tuple[tuple[int, int, int], ...]:
    """Returns the dimensions of a write of a tensor, from a source of the same shape, with as few dimensions as possible."""
    unit = target.element_size()
    others = [0] * target.dim() if source is None else [stride * source.element_size() for stride in source.stride()]
    return _merge((size, stride * unit, other) for size, stride, other in zip(target.shape, target.stride(), others))


def _merge(dims: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    merged: list[tuple[int, int, int]] = []
    for size, stride, other in sorted((one for one in dims if one[0] != 1), key=lambda one: (-one[1], -one[2])):
        if merged and merged[-1][1:] == (stride * size, other * size):
            merged[-1] = (merged[-1][0] * size, stride, other)
        else:
            merged.append((size, stride, other))
    return tuple(merged)


def _through(
    dims: Sequence[tuple[int, int, int]], start: int, inner: Sequence[tuple[int, int, int]], inner_start: int
) -> tuple[int, tuple[tuple[int, int, int], ...]] | None:
    """Composes two mappings of which one ends in the storage in which the other begins.

    ``dims`` are sizes, strides on this side, and strides in the storage; ``inner`` are sizes, strides in the storage, and strides on the
    far side. Returns the offset on the far side, and sizes with the strides on both sides; None if not all elements of ``dims`` are among those of
    ``inner``, or cannot be expressed so.
    """
    inner = sorted((one for one in inner if one[0] != 1), key=lambda one: -one[1])
    for (_, stride, _), (size, below, _) in zip(inner, [*inner[1:], (1, 1, 0)]):
        if below == 0 or stride < size * below:
            return None
    rest = start - inner_start
    if rest < 0:
        return None
    far, used = 0, []
    for _, stride, other in inner:
        digit, rest = divmod(rest, stride)
        used.append(digit)
        far += digit * other
    if rest or any(digit >= size for digit, (size, _, _) in zip(used, inner)):
        return None
    result, todo = [], list(dims)
    while todo:
        size, here, stride = todo.pop()
        if size == 1 or stride == 0:
            result.append((size, here, 0))
            continue
        number = next((number for number, one in enumerate(inner) if one[1] <= stride), None)
        if number is None or stride % inner[number][1]:
            return None
        step = stride // inner[number][1]
        if used[number] + step * (size - 1) < inner[number][0]:
            used[number] += step * (size - 1)
            result.append((size, here, step * inner[number][2]))
            continue
        # It leaves this dimension of the other mapping: the outer part of it is in the next one.
        outer = inner[number - 1][1] if number else 0
        count = outer // stride
        if outer % stride or not 1 < count < size or size % count:
            return None
        todo += [(count, here, stride), (size // count, here * count, outer)]
    return far, tuple(result)


class _Storage:
    """A storage during a recording. The weak reference keeps its identity from reuse, not its memory."""

    def __init__(self, storage: Any) -> None:
        self.reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call,unused-ignore]
        self.sources: list[tuple[int, int, Source]] = []
        """First and last offset of each source in it, in order; of sources with the same first offset, the longest."""
        self.tensors: list[tuple[str, Any, bool]] = []
        """The module's tensors in it, with their names; whether they are parameters."""
        self.writes: list[Write] = []
        self.derived = False
        """Whether it has bytes of the weights, or the result of an operation on them."""

    def add(self, write: Write) -> None:
        self.writes = [one for one in self.writes if not write.replaces(one)]
        self.writes.append(write)

    def source(self, first: int, last: int) -> tuple[Source, int] | None:
        """Returns the source that has the bytes from first to last, and its offset."""
        number = bisect.bisect_right(self.sources, first, key=lambda one: one[0]) - 1
        if number >= 0 and last <= self.sources[number][1]:
            return self.sources[number][2], self.sources[number][0]
        return None


class Tree:
    """The tensors of a module, and where they are."""

    def __init__(self, module: Any) -> None:
        self.module = module
        tables = [table for one in module.modules() for table in (one._modules, one._parameters, one._buffers)]
        self._sizes = [(table, len(table)) for table in tables]
        self._entries = [(table, key, value) for table in tables for key, value in table.items()]
        self._tensors = [value for _, _, value in self._entries if isinstance(value, torch.Tensor)]
        self._layout = self._look()

    def _look(self) -> list[Any]:
        return [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in self._tensors]

    def is_as_before(self) -> bool:
        """Returns whether the module has the same tensors, at the same addresses."""
        return (
            all(len(table) == size for table, size in self._sizes)
            and all(table.get(key) is value for table, key, value in self._entries)
            and self._look() == self._layout
        )


class Recording(TorchDispatchMode):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """A load that is watched: ``with recording:`` around each piece of it, and ``part`` before the pieces that read further tensors."""

    def __init__(self, module: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.tree = Tree(module)
        self._storages: dict[int, _Storage] = {}
        self._places: dict[Source, tuple[int, int]] = {}
        """The key of each source's storage, and the offset of the source in it."""
        self._parts = 0
        self._reason: str | None = None
        for find, parameters in ((module.named_parameters, True), (module.named_buffers, False)):
            for name, tensor in find(remove_duplicate=False):
                if tensor.numel():
                    self._storage(tensor).tensors.append((name, tensor.detach(), parameters))

    def part(self, tensors: Sequence[Any]) -> None:
        """States the tensors from which the load reads next. They stay as they are while it reads."""
        changed: dict[int, _Storage] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                first = _start(tensor)
                last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) * tensor.element_size()
                storage, key = self._storage(tensor), tensor.untyped_storage()._cdata
                storage.sources.append((first, last + tensor.element_size() - 1, Source(self._parts, index)))
                changed[key] = storage
                self._places[Source(self._parts, index)] = key, first
        self._parts += 1
        for storage in changed.values():
            sources = storage.sources = sorted(storage.sources, key=lambda one: (one[0], -one[1]))
            storage.sources = [one for number, one in enumerate(sources) if number == 0 or one[0] != sources[number - 1][0]]
            if any(after[0] <= before[1] for before, after in zip(storage.sources, storage.sources[1:])):
                self._refuse("tensors overlap that the load receives")

    def end(self) -> Plan:
        """Returns the plan of the load, which has ended. Raises ``NotCopiesError`` if there is none."""
        if self._reason is None and not self.tree.is_as_before():
            self._refuse("the load replaces parameters")
        if self._reason is None and self._outlives():
            # What is only referred to by itself is not kept.
            gc.collect()
            kept = self._outlives()
            if kept is not None:
                self._refuse(f"the load keeps another tensor that it has made of the weights, of {kept.nbytes()} B")
        writes = [] if self._reason is not None else [one for storage in self._storages.values() for one in self._checked(storage)]
        if self._reason is not None:
            raise NotCopiesError(self._reason)
        return Plan(self.tree, self._parts, writes)

    def _outlives(self) -> Any:
        """Returns a storage with bytes of the weights that is neither the module's nor the caller's."""
        for key, storage in self._storages.items():
            if storage.derived and not storage.tensors and not storage.sources:
                alive = torch.UntypedStorage._new_with_weak_ptr(key)
                if alive is not None:
                    return alive
        return None

    def _checked(self, storage: _Storage) -> list[tuple[Any, Write]]:
        """Returns the writes of a storage of the module, as views of it; refuses if they do not make its parameters."""
        if not storage.tensors:
            return []
        views = []
        for write in storage.writes:
            if isinstance(write.origin, Other):
                self._refuse(f"{storage.tensors[0][0]}: {write.origin.reason}")
                return []
            dims = [(size, stride) for size, stride, _ in write.dims]
            views.append((_view(storage.tensors[0][1], write.dtype, write.offset, dims), write))
        try:
            covered = _union(storage.writes)
            for name, tensor, parameter in storage.tensors:
                if (parameter or storage.writes) and not _contains(covered, Write(_start(tensor), _dims(tensor), tensor.dtype, Fill(0))):
                    self._refuse(f"{name}: the load does not write all of it")
        except NotCopiesError as error:
            self._refuse(f"{storage.tensors[0][0]}: {error}")
        return views

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._reason is None:
            try:
                self._watch(func, args, kwargs or {}, out)
            except NotCopiesError as error:
                self._refuse(str(error))
            except Exception as error:
                # Such as a subclass of tensors without a storage. The load goes on.
                self._refuse(f"{func}: {type(error).__name__}: {error}")
        return out

    def _refuse(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _storage(self, tensor: Any) -> _Storage:
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None:
            found = self._storages[storage._cdata] = _Storage(storage)
        return found

    def _known(self, tensor: Any) -> _Storage | None:
        """Returns the storage of a tensor if it has bytes of the weights."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found if found is not None and (found.writes or found.sources) else None

    def _watch(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func is _aten.copy_.default:
            self._copy(args[0], args[1])
        elif func is _aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1]):
                self._copy(target, source)
        elif func in _CLONES:
            if out.untyped_storage()._cdata != args[0].untyped_storage()._cdata:
                self._copy(out, args[0])
        elif func in _FILLS:
            self._write(args[0], Fill(args[1] if len(args) > 1 else 0))
        else:
            self._other(func, args, kwargs, out)

    def _copy(self, target: Any, source: Any) -> None:
        if target.is_meta or target.numel() == 0:
            return
        known = None if source.is_meta else self._known(source)
        if known is None:
            self._write(target, Other("a tensor is copied to it that is not one of the weights"))
            return
        if source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
            raise NotCopiesError("tensors are copied that are conjugated or negated")
        source = source.expand_as(target)
        self._changes(target)
        storage = self._storage(target)
        storage.derived |= known.derived or bool(known.sources)
        for write in self._read(known, target, source):
            storage.add(write)
            if storage.tensors and not self._is_equal(storage, write):
                self._write(target, Other("its bytes are not those of the tensors that were copied to it"))

    def _read(self, known: _Storage, target: Any, source: Any) -> list[Write]:
        """Returns the writes of a target that a copy from a storage with bytes of the weights makes."""
        dims, start, first = _dims(target, source), _start(target), _start(source)
        everything = Write(start, dims, target.dtype, Other("a tensor is copied to it of which the load has not written all"))
        if known.sources:
            last = first + sum((size - 1) * other for size, _, other in dims) + source.element_size() - 1
            found = known.source(first, last)
            if found is None:
                raise NotCopiesError("bytes are read that are in no tensor of the load")
            return [everything._replace(origin=found[0], source_offset=first - found[1], source_dtype=source.dtype)]
        writes: list[Write] = []
        # Sizes, strides in the storage, and strides in the target.
        backward = [(size, other, stride) for size, stride, other in dims]
        for write in known.writes:
            if write.dtype.itemsize != source.element_size():
                return [everything._replace(origin=Other("it is copied with element types of several sizes"))]
            forward = _through([(size, other, stride) for size, stride, other in write.dims], write.offset, backward, first)
            if forward is not None:
                offset, found_dims = forward
                writes.append(write._replace(offset=start + offset, dims=_merge((size, far, here) for size, here, far in found_dims)))
                continue
            inside = _through([(size, stride, other) for size, stride, other in dims], first, write.dims, write.offset)
            if inside is not None:
                offset, found_dims = inside
                writes = [write._replace(offset=start, dims=_merge(found_dims), source_offset=write.source_offset + offset)]
            elif _meet(write, Write(first, _merge((size, other, 0) for size, _, other in dims), source.dtype, Fill(0))):
                return [everything._replace(origin=Other("it is copied in parts that are too intricate"))]
        if source.dtype != target.dtype:
            writes = [self._cast(write, source.dtype, target.dtype) for write in writes]
        if sum(write.nbytes for write in writes) < everything.nbytes:
            writes.insert(0, everything)
        return writes

    @staticmethod
    def _cast(write: Write, before: Any, after: Any) -> Write:
        if isinstance(write.origin, Other) or isinstance(write.origin, Source) and write.source_dtype == write.dtype == before:
            return write._replace(dtype=after)
        return write._replace(dtype=after, origin=Other("its element type changes twice"))

    def _is_equal(self, storage: _Storage, write: Write) -> bool:
        """Returns whether the written bytes are those of the source, which may have been freed, which is a no."""
        if not isinstance(write.origin, Source):
            return True
        key, begin = self._places[write.origin]
        alive = torch.UntypedStorage._new_with_weak_ptr(key)
        if alive is None or write.dtype.itemsize not in _BITS:
            return False
        tensor = storage.tensors[0][1]
        there = torch.empty(0, dtype=write.source_dtype, device=alive.device).set_(alive)
        source = _view(there, write.source_dtype, begin + write.source_offset, [(size, other) for size, _, other in write.dims])
        target = _view(tensor, write.dtype, write.offset, [(size, stride) for size, stride, _ in write.dims])
        bits = _BITS[write.dtype.itemsize]
        return bool(torch.equal(target.view(bits), source.to(device=target.device, dtype=write.dtype).view(bits)))

    def _write(self, target: Any, origin: Fill | Other, derived: bool = False) -> None:
        if not target.is_meta and target.numel():
            self._changes(target)
            storage = self._storage(target)
            storage.derived |= derived
            storage.add(Write(_start(target), _dims(target), target.dtype, origin))

    def _changes(self, target: Any) -> None:
        if self._storage(target).sources:
            raise NotCopiesError("the load changes the tensors that it receives")

    def _other(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes what an operation reads and writes that is neither a copy nor a constant."""
        inputs = [one for one in _tensors((args, kwargs)) if not one.is_meta]
        found = [self._storages.get(one.untyped_storage()._cdata) for one in inputs]
        reads = any(one is not None and (one.derived or bool(one.sources)) for one in found)
        outputs = _tensors(out)
        reason = Other(f"it is a result of {func}")
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in _tensors(args[number] if number < len(args) else kwargs.get(argument.name)):
                    self._write(one, reason, reads)
        if not reads:
            return
        if not outputs and func._schema.returns:
            raise NotCopiesError(f"the load depends on values of the weights: {func}")
        shared = {one.untyped_storage()._cdata for one in inputs}
        for one in outputs:
            if not one.is_meta and one.untyped_storage()._cdata not in shared:
                self._write(one, reason, True)


class Plan:
    """The copies that repeat a load."""

    def __init__(self, tree: Tree, parts: int, writes: Sequence[tuple[Any, Write]]) -> None:
        self._tree = tree
        self._fills = [(view, write.origin.value) for view, write in writes if isinstance(write.origin, Fill)]
        self._copies: list[list[tuple[Any, int, Any, list[int], list[int], int]]] = [[] for _ in range(parts)]
        for view, write in writes:
            if isinstance(write.origin, Source):
                unit = write.source_dtype.itemsize
                if any(other % unit for _, _, other in write.dims) or write.source_offset % unit:
                    raise NotCopiesError("tensors are read with another element type than their own")
                layout = [size for size, _, _ in write.dims], [other // unit for _, _, other in write.dims], write.source_offset // unit
                self._copies[write.origin.part].append((view, write.origin.number, write.source_dtype, *layout))

    def onto(self, address: int, block: Any) -> Plan:
        """Returns the plan that writes a block of bytes in place of the one at ``address``. Constants elsewhere stay there; raises
        ``NotCopiesError`` if tensors are copied elsewhere.
        """
        moved = copy.copy(self)
        moved._fills = [(_moved(view, address, block) if is_in(view, address, block) else view, value) for view, value in self._fills]
        moved._copies = [[(_moved(view, address, block), *rest) for view, *rest in part] for part in self._copies]
        return moved

    def bind(self) -> None:
        """Has the plan fit the module as it is now."""
        self._tree = Tree(self._tree.module)

    def fits(self, module: Any) -> bool:
        """Returns whether the module has the tensors that the plan writes, where they were."""
        return self._tree.module is module and self._tree.is_as_before()

    def count(self) -> int:
        """Returns the number of copies."""
        return sum(map(len, self._copies))

    def copy(self, part: int, tensors: Sequence[Any]) -> None:
        """Copies the tensors of a part, which have the layout of those of the load, on the current stream."""
        with torch.no_grad():
            if part == 0:
                for view, value in self._fills:
                    view.fill_(value)
            for view, index, dtype, sizes, strides, offset in self._copies[part]:
                source = tensors[index]
                if source.dtype != dtype:
                    source = source.view(dtype)
                # One copy for each part: PyTorch's copy of a list takes longer on a device.
                view.copy_(source.as_strided(sizes, strides, source.storage_offset() + offset), non_blocking=True)


class RecordedLoad:
    """The loads of a module, and their plans by key: what has to be equal of two loads so that one plan repeats both."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._plans: list[tuple[Any, Plan | None]] = []
        """Of the loads that were recorded, the last one at the end; None for one that is not only copies."""
        self._key: Any = None
        self._plan: Plan | None = None
        """That of the last load."""
        self._recording: Recording | None = None
        self._reasons: set[str] = set()
        self._unused = 0
        """The number of plans in a row that no load has had before the module changed."""

    def plan(self, key: Any) -> Plan | None:
        """Returns the plan of a load with this key, if the module is as it was when it was recorded."""
        self._key, self._plan = key, next((plan for other, plan in self._plans if other == key), None)
        if self._plan is not None:
            if self._plan.fits(self.module):
                self._unused = 0
            else:
                self._unused += 1
                self._drop()
        return self._plan

    def record(self, key: Any) -> Recording | None:
        """Returns a new recording; None if it is known that a load with this key is not only copies."""
        if key is None or (key, None) in self._plans:
            return None
        last = next((plan for _, plan in reversed(self._plans) if plan is not None), None)
        if last is not None and not last.fits(self.module):
            self._drop()
        self._key, self._plan, self._recording = key, None, None
        if self._unused >= MAX_UNUSED:
            self._refuse(f"its parameters were replaced before each of {MAX_UNUSED} loads in a row")
            return None
        try:
            self._recording = Recording(self.module)
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
        return self._recording

    def finish(self) -> None:
        """Makes the plan of a load that was recorded, and that has ended. Logs once why there is none."""
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                self._remember(recording.end())
            except NotCopiesError as error:
                self._refuse(str(error))

    def move(self, address: int, block: Any) -> bool:
        """Moves the plan of the last load from the block of bytes at an address to another one, which is the module's now. Returns whether
        there is a plan.
        """
        try:
            if self._plan is not None:
                plan = self._plan.onto(address, block)
                plan.bind()
                # The others write the former block.
                self._drop()
                self._remember(plan)
        except NotCopiesError as error:
            self._refuse(str(error))
        return self._plan is not None

    def forget(self) -> None:
        """Drops the plans, and the recording of a load that has failed."""
        self._key, self._plan, self._recording = None, None, None
        self._plans.clear()

    def __call__(self, load: Any, weights: Sequence[tuple[str, Any]]) -> None:
        """Loads named tensors by ``load(weights)``, or by the plan of an equal load."""
        key, tensors = load_key(load, layout(weights)), [tensor for _, tensor in weights]
        plan = self.plan(key)
        if plan is not None:
            plan.copy(0, tensors)
            return
        recording = self.record(key)
        try:
            with recorded(recording, tensors):
                load(weights)
        except BaseException:
            self.forget()
            raise
        self.finish()

    def _drop(self) -> None:
        """Drops the plans, which keep the memory that they write."""
        self._plan, self._plans = None, [one for one in self._plans if one[1] is None]

    def _remember(self, plan: Plan | None) -> None:
        self._plan = plan
        self._plans = [one for one in self._plans if one[0] != self._key][1 - MAX_PLANS :]
        self._plans.append((self._key, plan))

    def _refuse(self, reason: str) -> None:
        self._remember(None)
        if reason not in self._reasons:
            self._reasons.add(reason)
            _logger.warning("device_ipc loads weights into %s without replay: %s", type(self.module).__name__, reason)


def recorded(recording: Recording | None, tensors: Sequence[Any] | None = None) -> contextlib.AbstractContextManager[object]:
    """Returns a context that records a piece of a load, which receives further tensors; or nothing, if there is no recording."""
    if recording is None:
        return contextlib.nullcontext()
    if tensors is not None:
        recording.part(tensors)
    return recording


def loads(module: Any) -> RecordedLoad:
    """Returns the loads of a module, which end with it."""
    found: RecordedLoad | None = vars(module).get(LOADS)
    if found is None or found.module is not module:
        found = RecordedLoad(module)
        setattr(module, LOADS, found)
    return found


def load_key(load: Any, *values: Any) -> Any:
    """Returns the key of a load, of its function and of what else has to be equal; None if no load is replayed."""
    # The function of a method is equal for all accesses to it.
    return None if os.environ.get(REPLAY) == "0" else (getattr(load, "__func__", load), *values)


def layout(weights: Sequence[tuple[str, Any]]) -> list[Any]:
    """Returns what has to be equal of named tensors so that a load of them has the same plan."""
    first: dict[int, int] = {}
    return [
        (name, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, first.setdefault(tensor.data_ptr(), number))
        for number, (name, tensor) in enumerate(weights)
    ]


def _tensors(value: Any) -> list[Any]:
    """Returns the tensors among arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in _tensors(one)]


def _start(tensor: Any) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _view(tensor: Any, dtype: Any, offset: int, dims: Sequence[tuple[int, int]]) -> Any:
    """Returns a view of the storage of a tensor, whose offset and strides are in bytes."""
    unit = dtype.itemsize
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset // unit, [size for size, _ in dims], [stride // unit for _, stride in dims])


def is_in(view: Any, address: int, block: Any) -> bool:
    """Returns whether a tensor is in the block at an address, which is as long as another one."""
    return bool(address <= view.data_ptr() < address + block.numel())


def _moved(view: Any, address: int, block: Any) -> Any:
    """Returns a view of a block of bytes at the place that another view has in the block at an address."""
    if not is_in(view, address, block):
        raise NotCopiesError("the load copies tensors to memory beside the parameters")
    offset = view.data_ptr() - address
    empty = torch.empty(0, dtype=view.dtype, device=block.device)
    return empty.set_(block.untyped_storage(), block.storage_offset() + offset // view.element_size(), view.size(), view.stride())


def _union(writes: Sequence[Write]) -> tuple[Any, Any]:
    """Returns the begins and ends of the bytes of all writes, in order. They must not overlap: else their order would matter."""
    if not writes:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    runs = [write.runs() for write in writes]
    begins = torch.cat([starts for starts, _ in runs])
    ends = torch.cat([starts + length for starts, length in runs])
    begins, order = begins.sort()
    ends = ends[order]
    if bool((ends[:-1] > begins[1:]).any()):
        raise NotCopiesError("parts of it are written twice")
    gaps = torch.cat([torch.tensor([True]), ends[:-1] != begins[1:]])
    last = torch.cat([gaps[1:], torch.tensor([True])])
    return begins[gaps], ends[last]


def _contains(union: tuple[Any, Any], write: Write) -> bool:
    begins, ends = union
    starts, length = write.runs()
    number = torch.searchsorted(begins, starts, right=True) - 1
    return bool((number >= 0).all()) and bool((starts + length <= ends[number.clamp(min=0)]).all())


def _meet(one: Write, other: Write) -> bool:
    """Returns whether two writes may have bytes in common."""
    ends = [write.offset + sum((size - 1) * stride for size, stride, _ in write.dims) + write.dtype.itemsize for write in (one, other)]
    if ends[0] <= other.offset or ends[1] <= one.offset:
        return False
    try:
        _union([one, other])
    except NotCopiesError:
        return True
    return False

"""Loads that are recorded and replayed as copies, with small models whose loaders do what those of engines do."""

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
from conftest import profiled

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

from device_ipc._recorded import NotCopiesError, RecordedLoad, Recording, layout, load_key, loads

HIDDEN, HEADS, INNER, VOCABULARY = 8, 2, 12, 20


def weights(names: "dict[str, tuple[int, ...]]", seed: int = 0, dtype: Any = torch.bfloat16) -> "list[tuple[str, Any]]":
    """Returns random bits, among them those of NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(bits)
    return [(name, torch.randint(info.min, info.max, shape, generator=generator, dtype=bits).view(dtype)) for name, shape in names.items()]


def state(module: Any) -> "dict[str, Any]":
    tensors = module.state_dict().items()
    return {name: bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) for name, tensor in tensors}


def parameter(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """A transformer's parameters on one of ``size`` tensor-parallel ranks: fused, sliced by rows and by columns, padded and tied."""

    def __init__(self, layers: int = 2, rank: int = 0, size: int = 1, dtype: Any = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.size, self.calls = rank, size, 0
        self.embed = torch.nn.Module()
        self.embed.weight = parameter(VOCABULARY + 4, HIDDEN, dtype=dtype)
        self.head = torch.nn.Module()
        self.head.weight = self.embed.weight
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            layer = torch.nn.Module()
            layer.qkv = parameter(3 * HIDDEN // size, HIDDEN, dtype=dtype)
            layer.gate_up = parameter(2 * INNER // size, HIDDEN, dtype=dtype)
            layer.down = parameter(HIDDEN, INNER // size, dtype=dtype)
            layer.norm = parameter(HIDDEN, dtype=dtype)
            layer.register_buffer("scale", torch.ones(1))
            self.layers.append(layer)

    def names(self) -> "dict[str, tuple[int, ...]]":
        found: "dict[str, tuple[int, ...]]" = {"embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN), "rotary": (3,)}
        for number in range(len(self.layers)):
            found.update({f"{number}.{one}": (HIDDEN, HIDDEN) for one in "qkv"})
            found.update({f"{number}.gate": (INNER, HIDDEN), f"{number}.up": (INNER, HIDDEN)})
            found.update({f"{number}.down": (HIDDEN, INNER), f"{number}.norm": (HIDDEN,)})
        return found

    def part(self, tensor: Any, dim: int) -> Any:
        count = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * count, count)

    def load(self, named: "list[tuple[str, Any]]") -> None:
        for name, tensor in named:
            self.calls += 1
            if name in ("embed", "head"):
                # The same parameter twice; its last rows are padding.
                self.embed.weight.data[:VOCABULARY].copy_(tensor)
                self.embed.weight.data[VOCABULARY:].fill_(0)
            elif name != "rotary":
                number, _, name = name.partition(".")
                layer = self.layers[int(number)]
                for fused, parts in ((layer.qkv, "q k v"), (layer.gate_up, "gate up")):
                    if name in parts.split():
                        rows = fused.shape[0] // len(parts.split())
                        fused.data.narrow(0, parts.split().index(name) * rows, rows).copy_(self.part(tensor, 0))
                if name == "down":
                    layer.down.data.copy_(self.part(tensor, 1))
                if name == "norm":
                    layer.norm.data.copy_(tensor)


class Other(torch.nn.Module):  # type: ignore[misc]
    """A module with one parameter, whose load is given."""

    def __init__(self, *shape: int, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.weight = parameter(*shape, dtype=dtype)
        self.names = {"weight": shape}


def replayed(recorded: RecordedLoad, load: Any, named: "list[tuple[str, Any]]") -> bool:
    """Loads the weights, and returns whether the load was replayed."""
    found = recorded.plan(load_key(load, layout(named))) is not None
    recorded(load, named)
    return found


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replay_equals_a_normal_load_bit_by_bit(rank: int, size: int, dtype: Any) -> None:
    model, reference = Decoder(rank=rank, size=size), Decoder(rank=rank, size=size)
    recorded = RecordedLoad(model)
    for step in range(4):
        named = weights(model.names(), step, dtype)
        if dtype != torch.bfloat16:
            # A cast is a copy, of which NaN may have several results.
            named = [(name, torch.nan_to_num(tensor)) for name, tensor in named]
        # Padding does not keep what was there.
        model.embed.weight.data.fill_(3)
        assert replayed(recorded, model.load, named) == (step > 0)
        reference.load(named)
        assert state(model) == state(reference)
    assert model.calls == len(model.names())


def test_layers_that_are_loaded_into_temporaries_are_recorded() -> None:
    """As vLLM's reload does: the loaders write a layer that is then copied into the tensors of the kernels."""
    model, reference = Decoder(rank=1, size=2), Decoder(rank=1, size=2)

    def load(named: "list[tuple[str, Any]]") -> None:
        kernel = [(layer, name, one) for layer in model.modules() for name, one in layer._parameters.items()]
        temporary: "dict[int, Any]" = {}
        for layer, name, one in kernel:
            layer._parameters[name] = temporary.setdefault(id(one), torch.nn.Parameter(torch.empty_like(one), requires_grad=False))
        model.load(named)
        for layer, name, one in kernel:
            one.data.copy_(layer._parameters[name])
            layer._parameters[name] = one

    recorded = RecordedLoad(model)
    for step in range(3):
        named = weights(model.names(), step)
        assert replayed(recorded, load, named) == (step > 0)
        reference.load(named)
        assert state(model) == state(reference)


TRANSPOSING: "dict[str, Any]" = {
    "view": lambda weight, tensor: weight.data.copy_(tensor.t()),
    "target": lambda weight, tensor: weight.data.t().copy_(tensor),
    "contiguous": lambda weight, tensor: weight.data.copy_(tensor.t().contiguous()),
    "in parts": lambda weight, tensor: [weight.data[:, at : at + 2].copy_(tensor.t().clone()[:, at : at + 2]) for at in range(0, 6, 2)],
    "reshaped": lambda weight, tensor: weight.data.copy_(tensor.reshape(3, 2, 4).transpose(0, 1).reshape(6, 4).clone().t()),
    "bits": lambda weight, tensor: weight.data.view(torch.int32).copy_(tensor.t().clone().view(torch.int32)),
    "listed": lambda weight, tensor: torch._foreach_copy_([weight.data[:2], weight.data[2:]], [tensor.t()[:2], tensor.t()[2:]]),
}


@pytest.mark.parametrize("how", TRANSPOSING)
def test_transposing_load_is_recorded(how: str) -> None:
    model, reference = Other(4, 6), Other(4, 6)
    recorded = RecordedLoad(model)

    def load(named: Any) -> None:
        TRANSPOSING[how](model.weight, named[0][1])

    for step in range(3):
        named = weights({"weight": (6, 4)}, step, torch.float32)
        assert replayed(recorded, load, named) == (step > 0)
        TRANSPOSING[how](reference.weight, named[0][1])
        assert state(model) == state(reference)


def quantise(weight: Any, tensor: Any) -> None:
    weight.data.copy_(torch.round(tensor / tensor.abs().amax() * 127))


def keep(weight: Any, tensor: Any) -> None:
    weight.data.copy_(tensor)
    weight.kept = weight.data.t().contiguous()


def decide(weight: Any, tensor: Any) -> None:
    weight.data.copy_(tensor if tensor.flatten()[0].item() > 0 else tensor + 0)


def numbered(weight: Any, tensor: Any) -> None:
    weight.data.copy_(tensor)
    weight.data[0].add_(1)


def some(weight: Any, tensor: Any) -> None:
    weight.data[:1].copy_(tensor[:1])


def uninitialised(weight: Any, tensor: Any) -> None:
    temporary = torch.empty_like(weight)
    temporary[:1].copy_(tensor[:1])
    weight.data.copy_(temporary)


def foreign(weight: Any, tensor: Any) -> None:
    weight.data.copy_(torch.ones(tensor.shape))


def threaded(weight: Any, tensor: Any) -> None:
    thread = threading.Thread(target=lambda: weight.data.copy_(tensor))
    thread.start()
    thread.join(60)


def unseen(weight: Any, tensor: Any) -> None:
    """As a kernel that is launched past PyTorch."""
    temporary = tensor.clone()
    temporary.numpy()[:] = 7
    weight.data.copy_(temporary)


def replaced(weight: Any, tensor: Any) -> None:
    weight.data = tensor.clone()


def changed(weight: Any, tensor: Any) -> None:
    weight.data.copy_(tensor.mul_(1))


def twice(weight: Any, tensor: Any) -> None:
    weight.data[:3].copy_(tensor[:3])
    weight.data[1:].copy_(tensor[1:])


REFUSED: "dict[Any, str]" = {
    quantise: "result of aten.round",
    keep: "keeps another tensor",
    decide: "depends on values",
    numbered: "result of aten.add_",
    some: "does not write all",
    uninitialised: "has not written all",
    foreign: "not one of the weights",
    threaded: "weight: the load does not write all",
    unseen: "are not those of the tensors",
    replaced: "replaces parameters",
    changed: "changes the tensors that it receives",
    twice: "written twice",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_load_that_is_not_only_copies_stays_normal(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, reference = Other(4, 6), Other(4, 6)
    recorded = RecordedLoad(model)
    calls = []

    def load(named: Any) -> None:
        calls.append(named)
        function(model.weight, named[0][1])

    with caplog.at_level(logging.WARNING, "device_ipc"):
        for step in range(3):
            named = weights({"weight": (4, 6)}, step, torch.float32)
            named[0] = ("weight", torch.nan_to_num(named[0][1]))
            assert not replayed(recorded, load, named)
            function(reference.weight, named[0][1])
            # The uninitialised part is not compared.
            assert torch.equal(model.weight[:1], reference.weight[:1])
    assert len(calls) == 3
    (record,) = [one for one in caplog.records if "without replay" in one.getMessage()]
    assert REFUSED[function] in record.getMessage()


def test_other_layouts_and_functions_are_recorded_again() -> None:
    model = Decoder()
    recorded = RecordedLoad(model)
    names = model.names()

    def load(named: Any) -> None:
        model.load(named)

    def check(function: Any, named: Any, expected: bool) -> None:
        assert replayed(recorded, function, named) == expected
        reference = Decoder()
        reference.load(named)
        assert state(model) == state(reference)

    check(model.load, weights(names), False)
    check(model.load, weights(names, 1), True)
    check(load, weights(names, 2), False)
    check(load, weights(names, 3), True)
    # Another order, another type, other strides, and the same memory for two names.
    check(load, weights(names, 4)[::-1], False)
    check(load, [(name, torch.ones_like(tensor, dtype=torch.float32)) for name, tensor in weights(names)], False)
    strided = [(name, torch.stack([tensor, tensor], -1)[..., 0]) for name, tensor in weights(names, 5)]
    check(load, strided, False)
    check(load, strided, True)
    # Views of one block, whose layout is that of separate tensors.
    tensors = dict(weights(names, 6))
    block = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).split([tensor.numel() for tensor in tensors.values()])
    views = {name: one.view(tensor.shape) for one, (name, tensor) in zip(block, tensors.items())}
    check(load, list(views.items()), True)
    views["head"] = views["embed"]
    check(load, list(views.items()), False)
    check(load, list(views.items()), True)
    # Those that were recorded before are known.
    check(load, strided, True)
    check(load, weights(names, 7)[::-1], True)
    check(model.load, weights(names, 8), True)


def test_loads_of_a_module_end_with_it_and_with_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder()
    names = model.names()
    for step in range(2):
        loads(model)(model.load, weights(names, step))
        loads(model)(model.load, weights(names, step)[::-1])
    assert model.calls == 2 * len(names)
    former = weakref.ref(model.layers[0].down.untyped_storage())
    model.layers[0].down.data = torch.zeros_like(model.layers[0].down)
    loads(model)(model.load, weights(names, 2))
    gc.collect()
    assert former() is None, "the plans of former parameters keep them"
    monkeypatch.setenv("DEVICE_IPC_REPLAY_LOADS", "0")
    before = model.calls
    for step in range(2):
        loads(model)(model.load, weights(names, step))
    assert model.calls == before + 2 * len(names)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_reason_is_logged_once_for_all_layouts(caplog: pytest.LogCaptureFixture) -> None:
    """As an update in many parts has, each of which writes some of the parameters."""
    model = Decoder()
    named = weights(model.names())
    with caplog.at_level(logging.WARNING, "device_ipc"):
        for _ in range(3):
            for pair in named[-3:]:
                loads(model)(model.load, [pair])
                assert loads(model).record(load_key(model.load, layout([pair]))) is None
    assert len({one.getMessage() for one in caplog.records}) == len(caplog.records)
    assert model.calls == 9


def test_replaced_parameters_and_modules_are_seen() -> None:
    model = Decoder()
    recorded = RecordedLoad(model)
    named = weights(model.names())
    assert [replayed(recorded, model.load, named) for _ in range(2)] == [False, True]
    changes: "list[Any]" = [
        lambda: setattr(model.layers[0], "norm", parameter(HIDDEN)),
        lambda: setattr(model.layers[0].down, "data", torch.zeros_like(model.layers[0].down)),
        lambda: model.layers.__setitem__(1, Decoder().layers[1]),
        lambda: model.layers[0].register_buffer("further", torch.ones(1)),
    ]
    for change in changes:
        change()
        assert [replayed(recorded, model.load, named) for _ in range(2)] == [False, True]
        reference = Decoder()
        reference.load(named)
        found = state(model)
        assert {name: found[name] for name in state(reference)} == state(reference)


def test_parameters_that_are_replaced_before_each_load_end_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    """As SGLang's begin_weight_update does for some quantised layers."""
    model = Decoder()
    recorded = RecordedLoad(model)
    key = load_key(model.load, layout(weights(model.names())))
    with caplog.at_level(logging.WARNING, "device_ipc"):
        for step in range(6):
            model.layers[0].norm = parameter(HIDDEN)
            assert not replayed(recorded, model.load, weights(model.names(), step))
    assert recorded.record(key) is None
    (record,) = caplog.records
    assert "replaced before each of 3 loads" in record.getMessage()


def test_failed_load_leaves_no_plan() -> None:
    model = Decoder()
    recorded = RecordedLoad(model)
    named = weights(model.names())

    def load(pairs: Any) -> None:
        model.load(pairs[:4])
        if fails:
            raise ZeroDivisionError
        model.load(pairs[4:])

    fails = True
    with pytest.raises(ZeroDivisionError):
        recorded(load, named)
    fails = False
    assert [replayed(recorded, load, named) for _ in range(2)] == [False, True]


def test_sources_in_several_parts_are_replayed_part_by_part() -> None:
    """As the buckets of a ring: bytes, of which the tensors are views, and of which each is gone before the next arrives."""
    model, reference = Decoder(), Decoder()
    plan = None
    for step in range(3):
        named = weights(model.names(), step)
        recording = Recording(model)
        for number in range(2):
            tensors = named[number::2]
            memory = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in tensors])
            parts = memory.split([tensor.nbytes for _, tensor in tensors])
            views = [(name, part.view(tensor.dtype).view(tensor.shape)) for part, (name, tensor) in zip(parts, tensors)]
            if plan is not None:
                plan.copy(number, [memory])
            else:
                recording.part([memory])
                with recording:
                    model.load(views)
        plan = plan or recording.end()
        reference.load(named[0::2] + named[1::2])
        assert state(model) == state(reference)


def test_overlapping_sources_are_refused() -> None:
    model = Other(4, dtype=torch.uint8)
    recording = Recording(model)
    memory = torch.arange(8, dtype=torch.uint8)
    recording.part([memory[:6], memory[4:]])
    with recording:
        model.weight.data.copy_(memory[:4])
    with pytest.raises(NotCopiesError, match="overlap"):
        recording.end()


def calls(function: Any) -> "dict[str, int]":
    """Returns the numbers of calls of Python and of C functions."""
    found = {"call": 0, "c_call": 0}

    def count(_frame: Any, event: str, _argument: Any) -> None:
        if event in found:
            found[event] += 1

    profiled(count, function)
    return found


def test_replay_calls_no_python_function_for_a_tensor() -> None:
    found = []
    for layers in (2, 12):
        model = Decoder(layers)
        recorded = RecordedLoad(model)
        named = weights(model.names())
        recorded(model.load, named)
        plan = recorded.plan(load_key(model.load, layout(named)))
        assert plan is not None and plan.count() == 7 * layers + 1
        tensors = [tensor for _, tensor in named]
        found.append((calls(lambda: plan.copy(0, tensors)), plan.count()))
    (few, few_count), (many, many_count) = found
    assert many["call"] == few["call"]
    # storage_offset, as_strided and copy_ for each part.
    assert many["c_call"] - few["c_call"] == 3 * (many_count - few_count)

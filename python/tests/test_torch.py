"""torch tensors on the mock, whose memory is CPU memory for torch. Skipped where torch cannot be imported."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import device_ipc
import device_ipc.torch as dt
from conftest import Start, profiled, unique
from test_share import finish, line, ones, tell

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

def eventually(what: str, expected: object, value: Callable[[], object]) -> None:
    """Waits until a value is the expected one."""
    until = time.monotonic() + 100
    while (found := value()) != expected:
        assert time.monotonic() < until, f"{what}: expected {expected!r}, found {found!r}"
        time.sleep(0.01)


def filled(shape: "list[int]", dtype: Any, value: float) -> Any:
    tensor = dt.empty(shape, dtype, "mock:0")
    return tensor.copy_(torch.full(shape, value).to(dtype))


def test_all_element_types_and_strides_arrive(start: Start) -> None:
    names = [
        "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64",
        "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    ]  # fmt: skip
    names = [name for name in names if hasattr(torch, name)]
    flat = dt.empty([64 * 16 * len(names)], torch.uint8, "mock:0")
    state = {}
    for number, name in enumerate(names):
        part = flat[64 * 16 * number : 64 * 16 * (number + 1)].view(getattr(torch, name))
        part.copy_(torch.ones(part.shape).to(part.dtype))
        state[name] = part[: part.numel() // 4 * 4].view(-1, 4).t()
    export = device_ipc.share(state)
    other = start(
        """
        import torch, device_ipc.torch as dt
        with dt.open(sys.argv[1]) as state:
            for name, tensor in state.items():
                assert tensor.dtype is getattr(torch, name) and tensor.stride() == (1, 4), name
                assert (tensor.to(torch.complex64).real == 1).all(), name
            print(len(state))
            del tensor
        """,
        str(export),
    )
    assert line(other) == str(len(names))
    finish(other)


def test_expanded_and_transposed_tensors_keep_their_strides(start: Start) -> None:
    row = dt.empty([4], torch.float32, "mock:0").copy_(torch.arange(4.0))
    grid = dt.empty([2, 3], torch.float32, "mock:0").copy_(torch.arange(6.0).view(2, 3))
    export = device_ipc.share({"expanded": row.expand(1000, 4), "transposed": grid.t()})
    other = start(
        """
        import torch, device_ipc.torch as dt
        with dt.open(sys.argv[1]) as state:
            expanded, transposed = state["expanded"], state["transposed"]
            assert expanded.shape == (1000, 4) and expanded.stride() == (0, 1) and expanded[999].tolist() == [0, 1, 2, 3]
            assert transposed.stride() == (1, 3) and transposed.tolist() == [[0, 3], [1, 4], [2, 5]]
            assert state.mapping["expanded"].nbytes == 16
            del expanded, transposed
        """,
        str(export),
    )
    finish(other)


def test_parameter_and_escaped_tensor(start: Start) -> None:
    parameter = torch.nn.Parameter(filled([3, 4], torch.float32, 2))
    row = parameter.as_strided((1, 4), (7, 1))
    export = device_ipc.share({"w": parameter, "row": row, "none": dt.empty([0, 3], torch.int32, "mock:0")})
    other = start(
        """
        import torch, device_ipc.torch as dt
        with dt.open(sys.argv[1]) as state:
            tensor = state["w"]
            assert state["none"].shape == (0, 3)
            assert state["row"].stride() == (7, 1) and tensor.stride() == (4, 1)
        tensor += 1
        print(tensor.sum().item())
        """,
        str(export),
    )
    assert line(other) == "36.0"
    finish(other)
    assert parameter.sum().item() == 36
    export.wait_released(timeout=30)


def test_read_only_memory_is_refused_unless_asked_for() -> None:
    export = device_ipc.share(ones(4, read_only=True), access="r")
    with pytest.raises(PermissionError, match="allow_read_only"):
        dt.open(str(export))


def test_tensors_that_are_not_plain_memory_are_refused() -> None:
    with pytest.raises(TypeError, match="sparse"):
        device_ipc.share(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="conjugate"):
        device_ipc.share(torch.ones(3, dtype=torch.complex64).conj())
    lazy = torch.ones(2, 3, dtype=torch.complex64).conj().imag
    for negative in [lazy, lazy.t(), lazy[1], lazy[:1, :1], lazy[0, 0], lazy.expand(4, 2, 3), lazy.as_strided((4,), (1,)), torch._neg_view(torch.ones(3))]:
        with pytest.raises(TypeError, match="negative"):
            device_ipc.share(negative)
    with pytest.raises(TypeError, match="quantized"):
        device_ipc.share(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))
    with pytest.raises(TypeError, match="meta"):
        device_ipc.share(torch.empty(3, device="meta"))
    with pytest.raises(device_ipc.Error, match="not device memory"):
        device_ipc.share(torch.ones(3))


def test_parts_of_complex_tensors_are_shared() -> None:
    pairs = dt.empty([6], torch.float32, "mock:0").copy_(torch.arange(6.0))
    with device_ipc.share(torch.view_as_complex(pairs.view(3, 2)).imag) as export, dt.open(str(export)) as state:
        assert state.tensor.tolist() == [1, 3, 5] and state.tensor.stride() == (2,)


def test_pool_is_for_cuda_only() -> None:
    with pytest.raises(device_ipc.UnsupportedError, match="npu|cpu"):
        with dt.pool("cpu"):
            pass
    assert dt.pool_blocks() == []


def block(count: int) -> "dict[str, Any]":
    """Returns tensors of 64 B in one allocation, each at a distance of 256 B."""
    flat = dt.empty([64 * count], torch.float32, "mock:0").fill_(1)
    return {f"layer.{i}.weight": flat[64 * i : 64 * i + 16].view(4, 4) for i in range(count)}


def events(call: "Callable[[], object]") -> int:
    """Returns the number of calls of Python functions, and of C functions by Python code."""
    count = 0

    def count_one(*_: object) -> None:
        nonlocal count
        count += 1

    call()
    profiled(count_one, call)
    return count


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="before PyTorch 2.10")
@pytest.mark.parametrize("is_one_block", [True, False])
def test_share_and_open_call_no_python_per_tensor(is_one_block: bool) -> None:
    def counts(number: int) -> "tuple[int, int]":
        state = block(number) if is_one_block else {str(i): filled([4], torch.float32, i) for i in range(number)}
        with device_ipc.share(state) as export:
            text = str(export)

            def open_all() -> None:
                with dt.open(text) as tensors:
                    assert len(tensors) == number

            return events(lambda: device_ipc.share(state)), events(open_all)

    assert counts(1000) == counts(10)


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="before PyTorch 2.10")
def test_share_looks_up_no_method_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    state = block(10)
    device_ipc.share(state)
    called: list[str] = []
    for name in ["is_neg", "is_conj", "untyped_storage", "data_ptr", "stride", "__dlpack__"]:
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name, **__: called.append(name))
    device_ipc.share(state)
    assert called == []


VIEWS = """
    import gc, warnings
    import torch
    if sys.argv[2:]:
        del torch.Tensor.__dlpack_c_exchange_api__
    import device_ipc.torch as dt
    is_exchanged = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    with dt.open(sys.argv[1]) as state:
        first, tied, turned, inner = (state[name] for name in ("first", "tied", "turned", "inner"))
        assert list(state) == ["first", "inner", "tied", "turned", "none", "scalar", "large"]
        assert first is not tied and first.untyped_storage()._cdata == tied.untyped_storage()._cdata
        assert turned.untyped_storage()._cdata == first.untyped_storage()._cdata and turned.stride() == (1, 4)
        if is_exchanged:
            assert first.untyped_storage().nbytes() == 64 and inner.untyped_storage().nbytes() == 16
            assert inner.storage_offset() == 0 and not inner.requires_grad
        assert inner.data_ptr() == first.data_ptr() + 16
        tied[1, 0] = 7
        assert first[1, 0] == inner[0] == turned[0, 1] == 7
        assert state["none"].shape == (0, 3) and state["scalar"].shape == () and state["scalar"].item() == 7.5
        assert state["large"].dtype is torch.float8_e4m3fn
        del first, tied, turned, inner
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dt.open(sys.argv[1]) as state:
            kept = state["inner"][1:]
    assert len(caught) == 1 and "'inner'" in str(caught[0].message), [str(one.message) for one in caught]
    print("kept", flush=True)
    sys.stdin.readline()
    kept += 1
    del kept
    sys.stdin.readline()
"""


@pytest.mark.parametrize("old", [[], ["before PyTorch 2.10"]], ids=["exchange", "old"])
def test_each_view_has_a_storage_and_tied_ones_share_it(start: Start, old: "list[str]") -> None:
    first = filled([4, 4], torch.float32, 1)
    flat = first.view(16)
    state = {"first": first, "inner": flat[4:8], "tied": flat.view(4, 4), "turned": first.t(), "none": first[:0, :3]}
    state["scalar"] = filled([1], torch.float64, 7.5)[0]
    state["large"] = dt.empty([256], torch.uint8, "mock:0").zero_().view(torch.float8_e4m3fn)
    export = device_ipc.share(state)
    other = start(VIEWS, str(export), *old)
    assert line(other) == "kept"
    with pytest.raises(device_ipc.StillHeldError):
        export.wait_released(timeout=0.3)
    tell(other, "drop")
    export.wait_released(timeout=30)
    assert flat[5] == 2
    tell(other, "end")
    finish(other)


def test_share_again_has_the_tensors_of_now() -> None:
    flat = dt.empty([65], torch.float32, "mock:0").copy_(torch.arange(65.0))
    state = {"a": flat[:16], "b": flat[16:32].view(4, 4), "c": flat[32:48], "d": flat[48:64].view(torch.int32)}
    states = [
        state,
        state,
        {**state, "b": state["b"].t()},
        {**state, "a": state["a"].view(torch.int32)},
        {**state, "b": torch.nn.Parameter(state["b"]), "c": flat[33:49]},
        {**state, "c": flat[32:47]},
        {**state, "c": state["c"].view(4, 4)},
        {**state, "c": state["d"]},
        {name: state[name] for name in ("a", "b", "c")},
        {name: state[name] for name in ("a", "c", "b", "d")},
        {**state, "e": flat[64:]},
        {"a" if name == "b" else "b" if name == "a" else name: tensor for name, tensor in state.items()},
        {**state, "b": flat[16]},
        state,
    ]

    def place(tensor: Any) -> "tuple[Any, ...]":
        return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()

    for number, one in enumerate(states):
        with device_ipc.share(one) as export, dt.open(export.descriptor) as views:
            found = [(name, place(view)) for name, view in views.items()]
        assert found == [(name, place(tensor)) for name, tensor in one.items()], number


def test_views_of_the_same_names_have_the_same_strings() -> None:
    with device_ipc.share(block(100)) as export:
        first, second, third = (list(dt.open(export.descriptor)) for _ in range(3))
    assert first == second == third == list(block(100))
    assert all(one is other for one, other in zip(second, third))
    with device_ipc.share({**block(3), "other": filled([4], torch.float32, 1)}) as export:
        assert list(dt.open(export.descriptor)) == [*block(3), "other"]


def test_element_types_that_dlpack_lacks_are_views_beside_others() -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has no such type")
    packed = device_ipc.empty((4,), "float4_e2m1fn_x2", "mock:0")
    export = device_ipc.share({"packed": packed, "also": packed, "plain": ones(4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dt.open(str(export)) as state:
            assert state["packed"].dtype is torch.float4_e2m1fn_x2 and state["plain"].sum() == 4
            assert state["also"].untyped_storage()._cdata == state["packed"].untyped_storage()._cdata
    with pytest.warns(ResourceWarning, match="'packed'"):
        with dt.open(str(export)) as state:
            kept = state["packed"]
    del kept
    export.close(timeout=30)


def test_views_of_a_read_only_mapping_need_permission() -> None:
    export = device_ipc.share({"a": ones(4, read_only=True)}, access="r")
    # The mock's memory is the host's, for which the flag of read-only memory is enough.
    assert dt.Tensors(device_ipc.open(str(export)))["a"].sum() == 4
    with dt.open(str(export), allow_read_only=True) as state:
        assert state["a"].sum() == 4


def test_tensor_sent_again_over_a_channel_is_one_export(start: Start) -> None:
    before = device_ipc.counters()
    with device_ipc.listen(unique("torch-sent-again"), backend="mock") as listener:
        other = start(
            """
            import torch
            channel = d.connect(unique("torch-sent-again"), backend="mock")
            requests = []
            while (message := channel.receive(timeout=60)).exports:
                with message.open() as mapping:
                    value = torch.from_dlpack(mapping.tensor).sum().item()
                requests.append(d.counters()["requests_total"])
                channel.send(str(value).encode())
            print(requests[99] - requests[1], flush=True)
            sys.stdin.readline()
            """
        )
        channel = listener.accept(timeout=60)
    tensor = filled([8], torch.float32, 0)
    for value in range(100):
        tensor.fill_(value)
        channel.send(b"", tensor)
        assert float(channel.receive(timeout=60).data) == 8 * value
    after = device_ipc.counters()
    assert after["exports_total"] - before["exports_total"] == 1

    def exports() -> int:
        return int(device_ipc.counters()["exports"] - before["exports"])

    # Other memory behind the same object is another export, and the former one ends soon.
    former = dt.empty([8], torch.float32, "mock:0").fill_(-1)
    tensor.data, former = former, tensor.data
    channel.send(b"", tensor)
    assert float(channel.receive(timeout=60).data) == -8
    # So does that of a tensor that is not sent any more, though its object stays.
    eventually("exports", 0, exports)
    # A part of it is another tensor, whose export ends with its object.
    channel.send(b"", tensor[:4])
    assert float(channel.receive(timeout=60).data) == -4
    channel.send(b"", tensor)
    assert float(channel.receive(timeout=60).data) == -8
    del tensor
    eventually("exports", 0, exports)
    channel.send(b"")
    assert line(other) == "0"
    tell(other, "end")
    finish(other)

"""torch tensors on the mock, whose memory is CPU memory for torch. Skipped where torch cannot be imported."""

from typing import Any

import pytest

import device_ipc
import device_ipc.torch as dt
from conftest import Start
from test_share import finish, line, ones

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

def filled(shape: "list[int]", dtype: Any, value: float) -> Any:
    tensor = dt.empty(shape, dtype, "mock:0")
    return tensor.copy_(torch.full(shape, value).to(dtype))


def test_all_element_types_and_strides_arrive_as_views_of_one_storage(start: Start) -> None:
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
            storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
            for name, tensor in state.items():
                assert tensor.dtype is getattr(torch, name) and tensor.stride() == (1, 4), name
                assert (tensor.to(torch.complex64).real == 1).all(), name
            print(len(storages), len(state))
        """,
        str(export),
    )
    assert line(other) == f"1 {len(names)}"
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
    with pytest.raises(TypeError, match="negative"):
        device_ipc.share(torch.ones(3, dtype=torch.complex64).conj().imag)
    with pytest.raises(TypeError, match="quantized"):
        device_ipc.share(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))
    with pytest.raises(TypeError, match="meta"):
        device_ipc.share(torch.empty(3, device="meta"))
    with pytest.raises(device_ipc.Error, match="not device memory"):
        device_ipc.share(torch.ones(3))


def test_pool_is_for_cuda_only() -> None:
    with pytest.raises(device_ipc.UnsupportedError, match="npu|cpu"):
        with dt.pool("cpu"):
            pass
    assert dt.pool_blocks() == []

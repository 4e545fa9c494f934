"""Types, for mypy and pyright as well as at run time: this file is checked by both, and run."""

import builtins
import collections.abc
import gc
import importlib
import pkgutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from conftest import unique

import device_ipc
import device_ipc.aio

if TYPE_CHECKING:
    from collections.abc import ItemsView, KeysView, ValuesView

    from typing_extensions import assert_type
else:

    def assert_type(value: Any, kind: Any) -> Any:
        return value


def names(mapping: "collections.abc.Mapping[str, device_ipc.Tensor]") -> "list[str]":
    return [name for name, tensor in mapping.items() if tensor.ndim > 0]


def test_mapping_is_a_mapping_of_names_to_tensors() -> None:
    state = {"b": device_ipc.empty((2, 3), "float32", "mock:0"), "a": device_ipc.empty((4,), "int8", "mock:0")}
    with device_ipc.share(state) as export, device_ipc.open(str(export)) as mapping:
        keys, values, items = mapping.keys(), mapping.values(), mapping.items()
        if TYPE_CHECKING:
            assert_type(keys, KeysView[str])
            assert_type(values, ValuesView[device_ipc.Tensor])
            assert_type(items, ItemsView[str, device_ipc.Tensor])
            assert_type(mapping["a"], device_ipc.Tensor)
            assert_type(mapping.get("a"), device_ipc.Tensor | None)
            assert_type(mapping.get("a", 1), device_ipc.Tensor | int)
        assert names(mapping) == list(keys) == list(mapping) == ["b", "a"]
        assert isinstance(keys, collections.abc.KeysView) and isinstance(items, collections.abc.ItemsView)
        assert isinstance(values, collections.abc.ValuesView)
        # Views are sets, as those of a dict.
        assert keys & {"a", "x"} == {"a"} and keys | {"x"} == {"a", "b", "x"} and len(keys) == len(values) == len(items) == 2
        assert "a" in keys and ("a", mapping["a"]) in items and mapping["a"] in values
        assert [tensor.shape for tensor in values] == [(2, 3), (4,)]
        assert mapping.get("a") == mapping["a"] and mapping.get("x") is None and mapping.get("x", 1) == 1
        assert mapping == mapping and mapping == dict(mapping) and dict(mapping) == mapping
        assert mapping != {} and mapping != {"b": mapping["b"], "a": mapping["b"]}
        with device_ipc.open(str(export)) as again:
            assert again == mapping
        # Last, since type checkers take what follows it for unreachable in a class that is no mapping.
        kind: object = mapping
        assert isinstance(kind, collections.abc.Mapping)
        with pytest.raises(TypeError, match="unhashable"):
            hash(mapping)
        del keys, values, items
    with pytest.raises(ValueError, match="closed"):
        mapping.items()


def test_tensors_are_equal_if_they_are_the_same_memory() -> None:
    one, other = device_ipc.empty((4,), "int8", "mock:0"), device_ipc.empty((4,), "int8", "mock:0")
    assert one == one and one != other and one != "one"
    assert one.bytes == one.bytes and one.bytes != one and len({one.bytes, one.bytes}) == 1


def test_tensor_has_the_sizes_of_an_array() -> None:
    for shape, dtype, ndim, size, itemsize in [((2, 3), "float32", 2, 6, 4), ((), "complex128", 0, 1, 16), ((0, 7), "int8", 2, 0, 1)]:
        tensor = device_ipc.empty(shape, dtype, "mock:0")
        assert (tensor.ndim, tensor.size, tensor.itemsize, tensor.nbytes) == (ndim, size, itemsize, size * itemsize)


def test_objects_have_weak_references() -> None:
    tensor = device_ipc.empty((4,), "int8", "mock:0")
    ring = device_ipc.Ring(device_ipc.empty((2, 256), "uint8", "mock:0"), slots=2)
    listener = device_ipc.listen(unique("test-types-weak"))
    export = device_ipc.share(tensor)
    mapping = device_ipc.open(str(export))
    objects: "list[Any]" = [tensor, ring, device_ipc.join(str(ring)), listener, export, mapping, device_ipc.Stream("mock:0")]
    references = [weakref.ref(one) for one in objects]
    assert all(reference() is one for reference, one in zip(references, objects, strict=True))
    del tensor, ring, listener, export, mapping
    objects.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


MODULES = [
    name
    for _, name, _ in pkgutil.iter_modules(device_ipc.__path__, "device_ipc.")
    if not name.rpartition(".")[2].startswith("_") and name != "device_ipc.verl_backend"
]


@pytest.mark.parametrize("name", ["device_ipc", *MODULES])
def test_import_of_all_names_shadows_no_builtin(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        # The framework of the module is not installed.
        assert error.name is None or not error.name.startswith("device_ipc")
        pytest.skip(str(error))
    exported = module.__all__
    assert list(exported) and not set(exported) & set(vars(builtins))
    assert all(hasattr(module, one) for one in exported)


def test_names_outside_of_all_can_be_imported() -> None:
    assert issubclass(device_ipc.TimeoutError, builtins.TimeoutError)
    assert callable(device_ipc.open) and callable(device_ipc.aio.next)

"""The text of ``help`` describes the signature: parameters, defaults, units and exceptions; the stub has the same defaults."""

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import device_ipc
from device_ipc import _native

STUB = Path(device_ipc.__file__).with_name("_native.pyi")
MODULES = ["device_ipc", "device_ipc.aio", "device_ipc.cupy", "device_ipc.numpy", "device_ipc.torch", "device_ipc.vllm"]
SECONDS = {"timeout", "limit", "seconds", "payload_lifetime"}


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__new__")


def documented() -> "Iterator[tuple[str, Callable[..., Any]]]":
    """Yields all public functions, and the public methods of all public classes."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in {*module.__all__, *(one for one in ("next", "open") if hasattr(module, one))}:
            one = getattr(module, name)
            if inspect.isclass(one):
                if issubclass(one, BaseException):
                    continue
                for method, function in vars(one).items():
                    if is_public(method) and callable(getattr(one, method)) and not isinstance(function, property):
                        yield f"{module_name}.{name}.{method}", getattr(one, method)
            elif callable(one):
                yield f"{module_name}.{name}", one


FUNCTIONS = dict(sorted(documented()))


def described(name: str) -> "tuple[inspect.Signature, str]":
    """Returns a signature and the text that describes it: for a constructor, that of its class too."""
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    owner, _, method = name.rpartition(".")
    if method in ("__init__", "__new__"):
        path, _, kind = owner.rpartition(".")
        made = getattr(importlib.import_module(path), kind)
        text = f"{made.__doc__}\n{text}"
        if method == "__new__":
            function = made
    return inspect.signature(function), text


def parameters(signature: inspect.Signature) -> "list[str]":
    return [name.strip("_") for name in signature.parameters if name not in ("self", "cls", "args", "kwargs")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_describes_parameters_units_and_exceptions(name: str) -> None:
    signature, text = described(name)
    assert text.strip(), f"{name} has no docstring"
    defaults = [one.name for one in signature.parameters.values() if one.default is Ellipsis]
    assert not defaults, f"help shows no default of {defaults}; write a literal in the signature of {name} (for PyO3: no Some(), no constant)"
    names = parameters(signature)
    missing = [one for one in names if not re.search(rf"\b{re.escape(one)}\b", text)]
    assert not missing, f"the docstring of {name} does not name {missing}; say what each does"
    if SECONDS & set(names):
        assert re.search(r"\bseconds?\b", text), f"the docstring of {name} gives no unit of {SECONDS & set(names)}; say that it is in seconds"
    if names:
        assert re.search(r"\b[Rr]aises\b", text), f"the docstring of {name} does not say which exceptions it raises: add 'Raises `…` if …'"
    for error in re.findall(r"\b[A-Z]\w*(?:Error|Warning|Interrupt)\b", text):
        known = hasattr(device_ipc, error) or hasattr(builtins, error)
        assert known, f"the docstring of {name} names {error}, which is no exception of device_ipc or of Python"


def stubbed() -> "Iterator[tuple[str, str, ast.expr]]":
    """Yields the defaults in the stub, by the paths of functions and the names of parameters."""
    def of(path: str, body: "list[ast.stmt]") -> "Iterator[tuple[str, str, ast.expr]]":
        for one in body:
            if isinstance(one, ast.ClassDef):
                yield from of(f"{path}{one.name}.", one.body)
            elif isinstance(one, ast.FunctionDef):
                if any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in one.decorator_list):
                    continue
                positional = [*one.args.posonlyargs, *one.args.args]
                given = one.args.defaults
                pairs = list(zip(positional[len(positional) - len(given) :], given, strict=True))
                pairs += [(key, value) for key, value in zip(one.args.kwonlyargs, one.args.kw_defaults, strict=True) if value]
                yield from ((path + one.name, argument.arg, default) for argument, default in pairs)

    yield from of("", ast.parse(STUB.read_text()).body)


def test_stub_has_the_defaults_of_the_functions() -> None:
    checked = 0
    for path, parameter, default in stubbed():
        function: Any = _native
        # The signature of a constructor is that of its class.
        for part in path.removesuffix(".__new__").split("."):
            function = getattr(function, part)
        text = ast.unparse(default)
        assert text != "...", f"the stub of {path} has no default of {parameter}; write its value"
        assert ast.literal_eval(default) == inspect.signature(function).parameters[parameter].default, (path, parameter)
        checked += 1
    assert checked > 50


def test_stub_points_to_the_docstrings() -> None:
    assert "help(device_ipc.open)" in (ast.get_docstring(ast.parse(STUB.read_text())) or "")

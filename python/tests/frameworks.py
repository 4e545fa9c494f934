"""Modules of frameworks, read from their wheels without installing them. The wheels are fetched once, into target/."""

import ast
import functools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

WHEELS = Path(__file__).parents[2] / "target" / "frameworks"


@functools.cache
def wheel(package: str, version: str) -> Path:
    """Returns the wheel of a package. Skips the test where it cannot be fetched."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    found = sorted(WHEELS.glob(pattern))
    if not found:
        WHEELS.mkdir(parents=True, exist_ok=True)
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(WHEELS)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", *command, f"{package}=={version}"], capture_output=True, text=True, timeout=200
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{package} {version} was not fetched within 200 s")
        found = sorted(WHEELS.glob(pattern))
        if done.returncode or not found:
            pytest.skip(f"{package} {version} cannot be fetched: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return found[0]


def source(package: str, version: str, module: str) -> str:
    """Returns the source of a module in the wheel of a package."""
    with zipfile.ZipFile(wheel(package, version)) as files:
        return files.read(module).decode()


def definitions(text: str, *names: str) -> str:
    """Returns the definitions of functions and classes of a module, without the rest of it."""
    found = {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in names
    }
    return "\n\n".join("from __future__ import annotations" if name == "" else str(found[name]) for name in ("", *names))


def methods(text: str, owner: str, *names: str) -> str:
    """Returns methods of a class of a module, as functions."""
    import textwrap

    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            parts = {
                one.name: ast.get_source_segment(text, one, padded=True)
                for one in node.body
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name in names
            }
            bodies = [textwrap.dedent(str(parts[name])) for name in names]
            return "from __future__ import annotations\n\n" + "\n\n".join(bodies)
    raise LookupError(owner)


def run(code: str, **names: Any) -> "dict[str, Any]":
    """Executes source in a namespace, and returns that."""
    names.setdefault("__name__", "frameworks")
    exec(compile(code, "<framework>", "exec"), names)
    return names

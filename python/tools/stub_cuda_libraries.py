"""Makes `import torch` work with the CUDA wheel of PyTorch, where the CUDA libraries are not installed.

The libraries are 2 GB. The wheel's own libraries are linked to them, but as long as no GPU is used they call only the runtime,
`libcudart`, whose wheel is 2 MB. This program builds a stub of each other missing library in `torch/lib`, where the dynamic
loader looks for it: the shared object name, and the symbols with their versions. A stub's functions return 999.

    pip install --no-deps torch nvidia-cuda-runtime
    pip install filelock fsspec jinja2 networkx 'setuptools<82' sympy typing-extensions
    python stub_cuda_libraries.py

It needs `cc`, and `nm` and `readelf` of binutils. The driver, `libcuda.so.1`, gets no stub: its absence is the answer that
device_ipc and `torch.cuda.is_available` expect.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RETURN_999 = {"x86_64": "mov $999, %eax; ret", "aarch64": "mov w0, #999; ret"}


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def needed_libraries(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "--dynamic", "--wide", library))


def undefined_symbols(library: Path) -> set[tuple[str, str]]:
    """Returns the C functions that a library needs, with their versions or ""."""
    found = re.findall(r"^ +U (\S+?)(?:@(\S+))?$", run("nm", "--dynamic", "--undefined-only", library), re.MULTILINE)
    return {(name, version) for name, version in found if not name.startswith(("_", "Py"))}


def defined_symbols(library: Path) -> set[str]:
    return set(re.findall(r"^\S+ \S (\w+)", run("nm", "--dynamic", "--defined-only", library), re.MULTILINE))


def needed_versions(library: Path, name: str) -> set[str]:
    """Returns the symbol versions that a library needs from the shared object of this name."""
    text = run("readelf", "--version-info", "--wide", library)
    return {
        version
        for file, versions in re.findall(r"File: (\S+)(.*?)(?=File: |\Z)", text, re.DOTALL)
        if file == name
        for version in re.findall(r"Name: (\S+) ", versions)
    }


def is_installed(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def build(stub: Path, symbols: set[tuple[str, str]]) -> None:
    """Builds a library with these symbols, which all have the address of one function."""
    assembly = [".text", "stub:", RETURN_999[platform.machine()]]
    for number, (name, version) in enumerate(sorted(symbols)):
        symbol = f"stub_{number}" if version else name
        assembly += [f".globl {symbol}", f".type {symbol}, %function", f".set {symbol}, stub"]
        if version:
            assembly.append(f".symver {symbol}, {name}@@{version}, remove")
    assembly.append('.section .note.GNU-stack,"",%progbits')
    versions = "".join(f"{version} {{}};\n" for version in sorted({version for _, version in symbols if version}))
    with tempfile.TemporaryDirectory() as directory:
        source, script = Path(directory, "stub.s"), Path(directory, "versions")
        source.write_text("\n".join(assembly) + "\n")
        script.write_text(versions)
        options = [f"-Wl,--version-script={script}"] if versions else []
        run("cc", "-shared", "-nostdlib", f"-Wl,-soname,{stub.name}", *options, "-o", stub, source)


def main() -> None:
    torch, nvidia = importlib.util.find_spec("torch"), importlib.util.find_spec("nvidia")
    if torch is None or torch.origin is None or nvidia is None:
        sys.exit("install torch and nvidia-cuda-runtime first: see the text of this program")
    directory = Path(torch.origin).parent / "lib"
    present = {path.name for root in nvidia.submodule_search_locations or [] for path in Path(root).rglob("*.so*")}
    # The libraries that `import torch` loads; the wheel opens others when they are used.
    libraries = [directory / "libtorch_python.so", directory / "libtorch_global_deps.so"]
    for library in libraries:
        libraries += [path for path in map(directory.joinpath, needed_libraries(library)) if path.exists() and path not in libraries]
    defined = {name for library in libraries for name in defined_symbols(library)}
    missing = {name for library in libraries for name in needed_libraries(library)} - present
    for name in sorted(name for name in missing if not (directory / name).exists() and not is_installed(name)):
        symbols = set()
        for library in (library for library in libraries if name in needed_libraries(library)):
            versions = needed_versions(library, name)
            for symbol, version in undefined_symbols(library):
                if version in versions or not version and symbol not in defined:
                    symbols.add((symbol, version))
        build(directory / name, symbols)
        print(f"{directory / name}: {len(symbols)} symbols")


if __name__ == "__main__":
    main()

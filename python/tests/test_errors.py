"""The texts of exceptions: facts of the library with remedies for users of Python."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import device_ipc
import device_ipc.numpy
from device_ipc import _native

ROOT = Path(__file__).resolve().parents[2]

# Texts that no user of Python gets: of functions that only Rust has, and names of logs and of attributes.
ONLY_IN_RUST = re.compile(
    r"try_as_fd returns this error|^device_ipc::\w+$|^(Option|Vec)::is_\w+$|names one; share it by a descriptor|"
    r"has a raw handle: allocate|pass a stream of CudaContext::new|no single range; take"
)


def texts() -> "set[str]":
    """Returns the string literals of the library that are not those of its tests, nor the texts of Rust's remedies."""
    found: "set[str]" = set()
    for package in ["ipc-core", "backend-ascend", "backend-cuda", "backend-mock"]:
        for file in (ROOT / package / "src").rglob("*.rs"):
            if "test" in str(file.relative_to(ROOT)) or file.name in ("bindings.rs", "fuzzing.rs", "remedy.rs"):
                continue
            if file.name == "properties.rs":
                continue
            code = re.sub(r"^ *//.*$|'.?\"'", "", file.read_text().split("#[cfg(test)]\nmod tests {")[0], flags=re.M)
            # The name of a type in its debug output is no advice.
            code = re.sub(r'#\[must_use = "[^"]*"\]|debug_struct\("\w+"\)', "", code)
            found.update(re.findall(r'"((?:[^"\\]|\\.)*)"', code, re.S))
    return found


def test_no_text_of_the_library_names_rust_outside_of_a_remedy() -> None:
    rust = re.compile(r"[A-Za-z]::[a-z]|enable (a|the) feature|\bIpc\b")
    found = {text for text in texts() if rust.search(text) and not ONLY_IN_RUST.search(text)}
    assert not found, f"make the advice a Remedy (ipc-core/src/model/error/remedy.rs): {sorted(found)}"


def remedies_of_python() -> "list[tuple[str, str]]":
    """Returns the texts for users of Python, with their names: of the library, and of the backends."""
    files = ROOT.glob("backend-*/src/remedy.rs")
    constants = [each for file in files for each in re.findall(r'const (\w+):.*?python: "([^"]*)"', file.read_text(), re.S)]
    assert len(constants) >= 3
    return _native._remedies() + constants


def test_remedies_have_texts_without_rust() -> None:
    remedies = remedies_of_python()
    assert len(remedies) > 30
    for name, text in remedies:
        assert text and not re.search(r"::|\bIpc\b|Builder|feature|cudarc|candle", text), (name, text)


def test_names_in_remedies_exist() -> None:
    for name, text in remedies_of_python():
        for path in re.findall(r"device_ipc((?:\.\w+)+)", text):
            owner: object = device_ipc
            for part in path.split(".")[1:]:
                if part != "torch":
                    owner = getattr(owner, part, None) or getattr(__import__("device_ipc.torch").torch, part)
        for kind, member in re.findall(r"\b([A-Z]\w+)\.(\w+)", text):
            assert hasattr(getattr(device_ipc, kind), member), (name, text)


def test_exception_has_the_remedy_of_python() -> None:
    shared = device_ipc.share(device_ipc.empty((4,), "float32", "mock:0", read_only=True), access="r")
    with pytest.raises(device_ipc.NotPermittedError, match="access=.* to device_ipc.share") as raised:
        device_ipc.open(str(shared), access="rw")
    assert "::" not in str(raised.value)


def test_shape_is_a_size_or_sizes_and_not_negative() -> None:
    assert device_ipc.empty(4, "float32").shape == (4,)
    with pytest.raises(ValueError, match="negative size -2"):
        device_ipc.empty((3, -2), "float32")
    with pytest.raises(TypeError, match="a size or a sequence of sizes"):
        device_ipc.empty("four", "float32")  # type: ignore[arg-type]


def test_keys_of_a_mapping_are_strings() -> None:
    with pytest.raises(TypeError, match=r"key 1 is of type int.*str\(key\)"):
        device_ipc.share({1: device_ipc.empty(4, "float32")})


def test_nested_mappings_have_dotted_names() -> None:
    tensor = device_ipc.empty(4, "float32")
    with device_ipc.share({"layer": {"0": {"weight": tensor}, "1": {"weight": tensor}}}) as shared:
        assert sorted(shared.descriptor.names) == ["layer.0.weight", "layer.1.weight"]
    with pytest.raises(ValueError, match='two tensors are called "a.b"'):
        device_ipc.share({"a": {"b": tensor}, "a.b": tensor})


@pytest.mark.parametrize("typo", ["flot32", "float_32", "Float32"])
def test_unknown_element_type_names_similar_ones(typo: str) -> None:
    with pytest.raises(ValueError, match="did you mean .*float32"):
        device_ipc.empty(4, typo)


def test_bytes_of_a_descriptors_text_open() -> None:
    with device_ipc.share(device_ipc.empty(4, "float32")) as shared:
        assert device_ipc.Descriptor(str(shared).encode()).names == shared.descriptor.names


def test_class_instead_of_a_tensor_is_named() -> None:
    for given in [np.ndarray, {"w": np.ndarray}]:
        with pytest.raises(TypeError, match="ndarray is a class, not a tensor"):
            device_ipc.share(given)


def run(program: str, *, limit: "int | None" = None, **environment: "str | None") -> str:
    """Returns the output of a Python program in a process with this environment and hard limit on open files."""
    kept = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    lower = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))) if limit is not None else None
    ended = subprocess.run(
        [sys.executable, "-c", "import device_ipc as d\n" + program],
        env=kept, capture_output=True, text=True, timeout=120, preexec_fn=lower,
    )
    return ended.stdout + ended.stderr


def test_forked_child_is_told_to_spawn() -> None:
    program = """
import os
s = d.share(d.empty(4, "float32"))
if os.fork() == 0:
    try: d.share(d.empty(4, "float32"))
    except d.ForkedError as e: print(e, flush=True)
    os._exit(0)
os.wait()
"""
    found = run(program)
    assert "spawn" in found and "::" not in found, found


def test_socket_directory_error_names_variable_and_limit(tmp_path: Path) -> None:
    share = "print(d.share(d.empty(4, 'float32')))"
    long = tmp_path / ("x" * 100)
    long.mkdir()
    found = run(share, DEVICE_IPC_SOCKET_DIR=str(long))
    assert "DEVICE_IPC_SOCKET_DIR" in found and "107 B" in found, found
    found = run(share, DEVICE_IPC_SOCKET_DIR="/nonexistent")
    assert "DEVICE_IPC_SOCKET_DIR" in found.splitlines()[-1], found


def test_first_allocation_fits_a_low_limit_of_open_files() -> None:
    assert run("s = d.share(d.empty(4, 'float32')); print('shared')", limit=64).startswith("shared")


def test_exhausted_open_files_name_the_limit() -> None:
    program = "kept = [d.empty(4, 'float32') for _ in range(200)]"
    assert "ulimit -n" in run(program, limit=64)


def test_unknown_backend_is_noticed_by_every_call() -> None:
    for call in ["d.devices()", "d.available()", "d.empty(4, 'float32', 'mock:0')", "d.empty(4, 'float32')"]:
        found = run(call, DEVICE_IPC_BACKEND="mcok").splitlines()[-1]
        assert "BackendError" in found and "mcok" in found and "mock" in found and "feature" not in found, found
    with pytest.raises(ValueError, match='"rocm:0" is not a device: expected'):
        device_ipc.empty(4, "float32", "rocm:0")


def test_cpu_is_not_the_simulator_unless_the_environment_selects_it() -> None:
    found = run("d.empty(4, 'float32', 'cpu')", DEVICE_IPC_BACKEND=None)
    assert "host memory" in found and "mock:0" in found, found
    assert run("print(d.empty(4, 'float32', 'cpu').shape)", DEVICE_IPC_BACKEND="mock") == "(4,)\n"


HOST = """
x = {make}
for given in [{{"rotary.inv_freq": x}}, x]:
    try: d.share(given)
    except d.PlacementError as e: print(e)
"""


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("backend", ["cuda", None])
def test_host_tensor_names_itself_and_the_remedy(framework: str, backend: "str | None") -> None:
    if framework == "torch":
        pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)
    make = "__import__('numpy').zeros(4, 'float32')" if framework == "numpy" else "__import__('torch').zeros(4)"
    named, alone = run(HOST.format(make=make), DEVICE_IPC_BACKEND=backend).splitlines()[-2:]
    for found in [named, alone]:
        assert "host memory" in found and "tensor.to(" in found and "mock" not in found, found
    assert 'tensor "rotary.inv_freq"' in named


OTHER_USER = """
import os, sys, subprocess
s = d.share(d.empty(4, 'float32'), allow_users=[65534])
code = "import os, sys, logging, device_ipc as d; os.setgid(65534); os.setuid(65534)\\nwith d.open(sys.argv[1], allow_users=[0]) as m: print('opened')"
r = subprocess.run([sys.executable, "-c", code, str(s)], capture_output=True, text=True, timeout=60)
print((r.stdout + r.stderr).splitlines()[-1])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_mock_between_users_works_as_its_error_says() -> None:
    assert "handles=fds" in run(OTHER_USER, DEVICE_IPC_MOCK="devices=2")
    assert run(OTHER_USER, DEVICE_IPC_MOCK="devices=2;handles=fds;events=off") == "opened\n"


def test_stream_of_another_device_than_the_memory_is_refused() -> None:
    stream = device_ipc.Stream("mock:1")
    with device_ipc.share(device_ipc.empty((4,), "float32", "mock:0")) as export:
        home = device_ipc.Descriptor(str(export)).homes[0]
        for device in ("mock:0", {home: "mock:0"}, {home: device_ipc.devices()[0].uuid}):
            for opened in (device_ipc.open, device_ipc.numpy.open):
                with pytest.raises(device_ipc.PlacementError, match="stream is of mock:1, and the memory is to be opened on"):
                    opened(str(export), device=device, stream=stream)
        with device_ipc.open(str(export), device={home: "mock:0"}, stream=device_ipc.Stream("mock:0")) as mapping:
            assert mapping.devices == ["mock:0"]

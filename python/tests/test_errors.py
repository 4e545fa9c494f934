"""The texts of exceptions: those of the library, with the names that methods have in Python."""

import re
from pathlib import Path

import pytest

import device_ipc
from device_ipc import _errors

ROOT = Path(__file__).resolve().parents[2]

# Methods of Rust programs: of an exporter written in Rust, or of calls that Python does not make.
ONLY_IN_RUST = {
    "Channel::try_as_fd",
    "ChannelReceiver::try_as_fd",
    "ChannelSender::try_as_fd",
    "ConnectBuilder::start",
    "CudaContext::new",
    "DeviceMemory::allocate_as",
    "DeviceMemory::read",
    "DeviceMemory::write",
    "Export::timelines",
    "Export::try_as_fd",
    "IpcBuilder::remote",
    "ListenBuilder::take_over",
    "Mapping::timeline",
    "Option::is_none",
    "Region::new",
    "Remote::new",
    "Ring::try_as_fd",
    "RingReader::try_as_fd",
    "ShareBuilder::dtype",
    "ShareBuilder::shape",
    "TensorSet::owned",
    "Timeline::wait_now",
    "Vec::is_empty",
}


def texts() -> "set[str]":
    """Returns the string literals of the library that are not those of its tests."""
    found: "set[str]" = set()
    for package in ["ipc-core", "backend-ascend", "backend-cuda", "backend-mock"]:
        for file in (ROOT / package / "src").rglob("*.rs"):
            if "test" in str(file.relative_to(ROOT)) or file.name in ("bindings.rs", "fuzzing.rs"):
                continue
            code = re.sub(r"^ *//.*$|'.?\"'", "", file.read_text().split("#[cfg(test)]\nmod tests {")[0], flags=re.M)
            code = re.sub(r'#\[must_use = "[^"]*"\]', "", code)
            found.update(re.findall(r'"((?:[^"\\]|\\.)*)"', code, re.S))
    return found


def test_every_method_in_a_text_has_a_name_in_python_or_is_of_rust_only() -> None:
    methods = {method for text in texts() for method in re.findall(r"\b[A-Z][A-Za-z]*::[a-z]\w*", text)}
    assert "IpcBuilder::allow" in methods and "OpenBuilder::or_staged" in methods
    # These stand in texts with their arguments.
    with_arguments = {"Ipc::builder", "ShareBuilder::exposure"}
    unknown = {method for method in methods if "::" in _errors.in_python(method)} - ONLY_IN_RUST - with_arguments
    assert not unknown, f"add them to _IN_PYTHON of device_ipc/_errors.py, or to ONLY_IN_RUST: {sorted(unknown)}"
    unused = {name for name in _errors._IN_PYTHON if name.count("(") == 0} - methods
    assert not unused, f"no text names these any more: {sorted(unused)}"


def test_names_that_python_has_exist() -> None:
    for text in _errors._IN_PYTHON.values():
        for kind, member in re.findall(r"(\w+)\.(\w+)", text):
            owner = device_ipc if kind == "device_ipc" else getattr(device_ipc, kind)
            assert hasattr(owner, member), text


def test_calls_with_arguments_are_replaced_as_a_whole() -> None:
    text = "set DEVICE_IPC_BACKEND=mock, or allow them (Ipc::builder().allow_simulated(true))"
    assert _errors.in_python(text) == "set DEVICE_IPC_BACKEND=mock"
    text = "share a copy (ShareBuilder::exposure(ExposurePolicy::Copy)), or"
    assert _errors.in_python(text) == 'share a copy (exposure="copy"), or'
    found = [text for text in texts() if any(call in re.sub(r"\\\n\s*", "", text) for call in _errors._IN_PYTHON if "(" in call)]
    assert len(found) == 4


def test_exception_names_the_method_of_python() -> None:
    shared = device_ipc.share(device_ipc.empty((4,), "float32", "mock:0", read_only=True), access="r")
    with pytest.raises(device_ipc.NotPermittedError, match="argument access of device_ipc.share") as raised:
        device_ipc.open(str(shared), access="rw")
    assert "::" not in str(raised.value)

"""``python -m device_ipc``."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import device_ipc
from device_ipc import _keep
from test_share import line, ones


def run(command: str) -> str:
    arguments = [sys.executable, "-m", "device_ipc", command]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120).stdout


def test_program_shows_devices_backends_and_exports() -> None:
    assert "mock:0" in run("devices") and "mock:1" in run("devices")
    assert "mock: 2 devices" in run("doctor")
    export = device_ipc.share(ones(4))
    assert f"{export.nbytes} B, mock, held by no process" in run("ps")


def test_demonstration_adds_one() -> None:
    assert "[2. 2. 2.]" in run("demo")


def stored(tensors: "dict[str, tuple[str, list[int], bytes]]") -> bytes:
    """Returns the bytes of a safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def model(value: float) -> bytes:
    weight = np.full((3, 5), value, np.float32)
    return stored({"empty": ("I64", [0], b""), "half": ("BF16", [3], b"\x80?" * 3), "weight": ("F32", [3, 5], weight.tobytes())})


KEEP = [sys.executable, "-m", "device_ipc", "keep"]


def test_keep_loads_reloads_and_ends(tmp_path: Path) -> None:
    name = f"python-program-{os.getpid()}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(model(1))
    keeper = subprocess.Popen(
        [*KEEP, str(tmp_path), "--name", name, "--device", "mock:1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert "version 1: " in line(keeper)
        first = device_ipc.open(f"keeper:{name}")
        assert first.devices == ["mock:1"] and first.read_only and len(first.regions) == 1
        assert {key: (one.dtype, one.shape) for key, one in first.items()} == {
            "empty": ("int64", (0,)), "half": ("bfloat16", (3,)), "weight": ("float32", (3, 5)),
        }  # fmt: skip
        assert bytes(np.from_dlpack(first["half"].bytes)) == b"\x80?" * 3
        dropped = threading.Event()
        first.on_dropped(dropped.set)
        path.write_bytes(b"no model")
        keeper.send_signal(signal.SIGHUP)
        assert keeper.stderr is not None and "the present version stays" in keeper.stderr.readline()
        path.write_bytes(model(2))
        keeper.send_signal(signal.SIGHUP)
        assert "version 2: " in line(keeper)
        assert dropped.wait(60)
        with device_ipc.open(f"keeper:{name}") as second:
            assert (np.from_dlpack(second["weight"]) == 2).all()
        assert (np.from_dlpack(first["weight"]) == 1).all()
        keeper.send_signal(signal.SIGTERM)
        assert f"process {os.getpid()} " in line(keeper)
        assert keeper.wait(60) == 0
        with pytest.raises(device_ipc.Error):
            device_ipc.open(f"keeper:{name}", timeout=0)
    finally:
        keeper.kill()
        keeper.communicate(timeout=60)


def test_keep_refuses_invalid_files(tmp_path: Path) -> None:
    good = model(1)
    header = 8 + int.from_bytes(good[:8], "little")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "truncated": (good[:-1], "download it again"),
        "longer": (good + b"x", "download it again"),
        "short": (b"x", "truncated"),
        "json": ((8).to_bytes(8, "little") + b"[1, 2, 3", "not a valid safetensors file"),
        "gap": (stored({"a": ("U8", [1], b"x")}).replace(b"[0, 1]", b"[1, 1]"), "do not follow"),
        "shape": (stored({"a": ("U8", [2], b"x")}), "which its shape"),
        "negative": (stored({"a": ("U8", [-1], b"x")}), "is not a number"),
        "huge": (stored({"a": ("U8", [2**62, 2**62], b"x")}), "which its shape"),
        "large": (stored({"a": ("U8", [0, 2**63], b"")}), "is not a number"),
        "type": (stored({"a": ("F6", [1], b"x")}), "not supported"),
        "none": (stored({}), "contain no tensor"),
        "header": ((17 << 20).to_bytes(8, "little") + bytes(17 << 20), "divide the file"),
    }
    assert header < len(good)
    runs = {"pipe": ([tmp_path / "pipe"], "not a regular file"), "directory": ([tmp_path / "directory"], "contains no file"),
            "absent": ([tmp_path / "absent"], "No such file")}  # fmt: skip
    for name, (data, text) in cases.items():
        (tmp_path / name).write_bytes(data)
        runs[name] = ([tmp_path / name], text)
    (tmp_path / "good").write_bytes(good)
    runs["twice"] = ([tmp_path / "good", tmp_path / "good"], "is in two files")
    parser = argparse.ArgumentParser()
    _keep.add_arguments(parser)
    for name, (paths, text) in runs.items():
        with pytest.raises((ValueError, OSError, device_ipc.Error), match=text):
            _keep.load(parser.parse_args([*map(str, paths), "--name", "n", "--device", "mock:0"]))
    ended = subprocess.run([*KEEP, str(tmp_path / "pipe"), "--name", "n"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and ended.stderr.endswith("is not a regular file\n") and "Traceback" not in ended.stderr

"""The program that carries a whole vLLM to a machine without a network: packing, selection of cases, processes and results."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from engines import carry, models, suite

TIMEOUT = 120


def wheel(folder: Path, name: str, files: "dict[str, bytes]") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    deep = "vllm/third_party/deep_gemm/_C.cpython-{}-x86_64-linux-gnu.txt"
    files = {"vllm/__init__.py": b"", carry.MOE.replace(".so", ".txt"): b"kept, since it is no library"}
    files |= {"vllm/benchmarks/a.py": b"", "vllm/vllm-rs": b"x", deep.format(311): b"", deep.format(312): b""}
    wheel(folder, "vllm", files)
    wheel(folder, "other", {"other/__init__.py": os.urandom(5000), "other-1.0.data/purelib/further.py": b"1", "other-1.0.data/scripts/run": b""})
    return folder


@pytest.mark.skipif(shutil.which("xz") is None, reason="there is no xz")
def test_parts_are_unpacked_when_the_last_has_arrived(wheels: Path, tmp_path: Path) -> None:
    sizes = carry.pack(wheels, tmp_path, part_bytes=2000)
    assert len(sizes) >= 3 and max(sizes) <= 2000
    parts = [tmp_path / f"part-{number}" for number in range(len(sizes))]
    site = tmp_path / "machine/site"
    # In any order, each of them gone before the next one comes.
    for number in reversed(range(1, len(sizes))):
        assert carry.unpack([parts[number]], site) == list(range(number))
        assert not site.exists()
        shutil.rmtree(parts[number])
    assert carry.unpack([parts[0]], site) == []
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    deep = "vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.txt"
    assert found == {"vllm/__init__.py", carry.MOE.replace(".so", ".txt"), deep, "other/__init__.py", "further.py"}


@pytest.mark.skipif(shutil.which("xz") is None, reason="there is no xz")
def test_damaged_and_foreign_parts_are_refused(wheels: Path, tmp_path: Path) -> None:
    sizes = carry.pack(wheels, tmp_path / "one", part_bytes=2000)
    wheel(wheels, "third", {"third.py": os.urandom(100)})
    carry.pack(wheels, tmp_path / "two", part_bytes=2000)
    site = tmp_path / "site"
    carry.unpack([tmp_path / "one/part-0"], site)
    with pytest.raises(ValueError, match="another pack"):
        carry.unpack([tmp_path / "two/part-1"], site)
    damaged = tmp_path / "one/part-1/data"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    with pytest.raises(ValueError, match="damaged"):
        carry.unpack([tmp_path / "one/part-1"], site)
    assert 1 not in [number for number in range(len(sizes)) if (tmp_path / "site.parts" / str(number)).exists()]


def test_kernels_for_mixtures_are_packed_on_request() -> None:
    assert carry.pruned(carry.MOE, False) and not carry.pruned(carry.MOE, True)
    assert carry.pruned("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", True)
    assert not carry.pruned("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", False)


def test_nixl_has_what_one_machine_needs() -> None:
    libraries = "nixl_cu13.libs/"
    for name in ("libucp-b39b.so.0.0.0", "ucx/libuct_cuda.so.0.0.0", "nixl/libplugin_UCX.so", "libgrpc++-95c5.so.1.73.0", "libabsl_base-5dc7.so"):
        assert not carry.pruned(libraries + name, False)
    for name in ("ucx/libuct_ib.so.0.0.0", "nixl/libplugin_OBJ.so", "libaws-c-s3-085f.so.1.0.0", "libmlx5-79ef.so.1.24.48.0"):
        assert carry.pruned(libraries + name, False)


def test_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "wrong", {"../../outside.py": b""})
    with pytest.raises(ValueError, match="outside the folder"):
        carry.install(tmp_path / "wheels", tmp_path / "site")


@pytest.mark.parametrize("engine", list(carry.WHEELS))
def test_wheels_have_exact_versions_without_pytorch(engine: str) -> None:
    names = [one.partition("==")[0] for one in carry.wheels(engine)]
    assert all(one.count("==") == 1 for one in carry.wheels(engine))
    assert engine in names and not {"torch", "triton", "ray"} & set(names)
    # vLLM needs no FlashInfer where its sampler is switched off.
    assert ("flashinfer-python" in names) == (engine == "sglang")


def test_sources_that_are_compiled_there_are_packed() -> None:
    data, jit = "flashinfer/data", "sglang/kernels/jit"
    for name in (f"{data}/csrc/norm.cu", f"{data}/cutlass/include/cutlass/cutlass.h", f"{jit}/include/a.cuh", "tvm_ffi/include/tvm/ffi/c_api.h"):
        assert not carry.pruned(name, False)
    assert carry.pruned("other/include/a.h", False) and carry.pruned("sgl_kernel/sm100/common_ops.abi3.so", False)


def engines(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "engines", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT)


def test_list_names_all_cases_without_vllm() -> None:
    found = engines("run", "--list")
    assert found.returncode == 0, found.stderr
    names = [line.partition(":")[0] for line in found.stdout.splitlines()]
    for name in ("update-export", "update-kept", "update-buckets", "killed-export", "sleep-1", "sleep-2", "tp2", "fp8", "moe", "lora", "stock-small", "kv", "kv-killed", "kv-times-nixl", "in-place-sleep-2", "in-place-kv-sizing", "in-place-draft", "update-graph-replay"):
        assert name in names
    assert all(line.partition(": ")[2] for line in found.stdout.splitlines())
    found = engines("run", "--list", "--engine", "sglang")
    names = [line.partition(":")[0] for line in found.stdout.splitlines()]
    assert {"sglang-import", "sglang-update", "sglang-replay", "sglang-in-place"} <= set(names) and "kv" not in names, found.stderr
    found = engines("run", "--list", "--only", "flat-*", "--only", "tp2")
    assert sorted(line.partition(":")[0] for line in found.stdout.splitlines()) == ["flat-buckets", "flat-export", "flat-kept", "tp2"]
    found = engines("run", "--list", "--only", "nothing")
    assert found.returncode != 0 and "no case matches 'nothing'" in found.stderr


CASES = '''
import os, subprocess, sys, time
from engines.suite import Skipped, case

@case("passes")
def passes(folder):
    """Measures"""
    return {"ms": 1.5, "copies": 3}

@case("fails")
def fails(folder):
    raise AssertionError("found | another")

@case("skips")
def skips(folder):
    raise Skipped("no device")

@case("dies")
def dies(folder):
    os.kill(os.getpid(), 9)

@case("hangs", deadline=3.0)
def hangs(folder):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    (folder / "child").write_text(str(child.pid))
    child.wait()

@case("last")
def last(folder):
    return {"path": os.environ["PYTHONPATH"].split(":")[1], "backend": os.environ["DEVICE_IPC_BACKEND"]}
'''


def test_each_case_has_its_own_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fake_cases.py").write_text(CASES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(suite, "MODULE", "fake_cases")
    monkeypatch.setattr(suite, "CASES", {})
    variables = suite.environment([tmp_path], {**os.environ, "DEVICE_IPC_BACKEND": "mock"})
    assert suite.run(suite.select([]), tmp_path / "out", variables) == 1
    results: "list[dict[str, Any]]" = json.loads((tmp_path / "out/results.json").read_text())
    outcomes = {one["name"]: one["outcome"] for one in results}
    expected = {"passes": "passed", "fails": "failed", "skips": "skipped", "dies": "died", "hangs": "timed out", "last": "passed"}
    assert outcomes == expected
    by_name = {one["name"]: one for one in results}
    assert by_name["passes"]["measured"] == {"ms": 1.5, "copies": 3}
    assert by_name["last"]["measured"] == {"path": str(tmp_path), "backend": "mock"}
    # Its descendants have ended with it.
    child = int((tmp_path / "out/hangs/child").read_text())
    assert not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()
    table = (tmp_path / "out/table.md").read_text()
    assert "| passes | passed |" in table and "ms 1.5, copies 3" in table and "found \\| another" in table
    assert all(line.replace("\\|", "").count("|") == 5 for line in table.splitlines())
    assert table in capsys.readouterr().out
    assert suite.run(suite.select(["passes", "skips"]), tmp_path / "out", variables) == 0


def test_checkpoint_has_the_tensors_of_the_configuration() -> None:
    names = models.shapes(models.SMALL)
    assert len(names) == 3 + 9 * models.SMALL["num_hidden_layers"]
    assert "lm_head.weight" in names and "lm_head.weight" not in models.shapes(models.TIED)
    assert sum(2 * _count(shape) for shape in models.shapes(models.LARGE).values()) == 16_060_522_496
    assert len(models.shapes(models.LARGE)) == 291
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in models.shapes(models.MIXTURE)


def _count(shape: "tuple[int, ...]") -> int:
    number = 1
    for one in shape:
        number *= one
    return number

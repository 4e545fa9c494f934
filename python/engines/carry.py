"""An engine and its dependencies in parts that a machine without a network can be sent: wheels by name, without what the suite does not need.

PyTorch and its dependencies are expected on that machine. ``wheels.txt`` and ``wheels-sglang.txt`` have the other packages, with versions that fit together.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

WHEELS = {"vllm": Path(__file__).with_name("wheels.txt"), "sglang": Path(__file__).with_name("wheels-sglang.txt")}
PART_BYTES = 58 << 20
"""A part is smaller than 60 MiB, with its manifest."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)] + ["manylinux1_x86_64", "manylinux2014_x86_64"]

MOE = "vllm/_moe_C_stable_libtorch.abi3.so"
PRUNED = [
    MOE,
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_flashmla*",
    "vllm/_qutlass*",
    "vllm/vllm-rs",
    "vllm/benchmarks/*",
    "mistral_common/data/*",
    "pycountry/locales/*",
    "*/tests/*",
    "nixl_ep*",
    "nixl_cu13.scripts/*",
    "*/include/*",
    "sgl_kernel/sm100/*",
    "sgl_kernel/flash*_ops*",
    "sgl_kernel/infllm_ops*",
    "sgl_kernel/spatial_ops*",
    "sglang/multimodal_gen/*",
    "sglang/test/*",
    "*.pyi",
    "*.pdb",
    "*/__pycache__/*",
]
NIXL = re.compile(r"\.?nixl_cu13(\.mesonpy)?\.libs/(.*/)?(?P<name>.*)")
NIXL_KEPT = re.compile(
    r"libplugin_UCX\.so|libuct_(cuda|cma)\.so|libucm_cuda\.so|libuc[mpst]-|libnixl(_build|_common)?\.so|lib(serdes|stream)\.so"
    r"|lib(etcd-cpp|grpc|gpr-|protobuf|re2|upb_|absl_|utf8_|address_sorting)"
)
"""Of the libraries of NIXL's wheel: its own, what they need, and UCX for processes of one machine."""
SOURCES = ["flashinfer/data/*", "sglang/kernels/*", "tvm_ffi/*"]
"""SGLang and FlashInfer compile kernels of these on the machine with GPUs, with headers of their own."""
STRIPPED = ["vllm/*.so", "sgl_kernel/*.so"]


def wheels(engine: str = "vllm") -> list[str]:
    return WHEELS[engine].read_text().split()


def fetch(into: Path, python: str, engine: str = "vllm") -> None:
    """Downloads the wheels of an engine with pip, for a version of Python."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={python}"]
    subprocess.run([*pip, *platforms, "--dest", str(into), "-r", str(WHEELS[engine])], check=True, timeout=1800)


def pruned(name: str, keep_moe: bool) -> bool:
    """Returns whether a file of a wheel is left out; of the files for single versions of Python, all but those of 3.12."""
    if keep_moe and name == MOE or any(fnmatch.fnmatch(name, pattern) for pattern in SOURCES):
        return False
    library = NIXL.fullmatch(name)
    if library is not None and not NIXL_KEPT.match(library["name"]):
        return True
    other = re.search(r"\.cpython-(\d+)-", name)
    return any(fnmatch.fnmatch(name, pattern) for pattern in PRUNED) or (other is not None and "deep_gemm" in name and other[1] != "312")


def install(folder: Path, site: Path, keep_moe: bool = False) -> None:
    """Unzips all wheels of a folder, without what the suite does not need."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                # Scripts and headers of a wheel are not imported.
                target = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)
                if not (name.endswith("/") or ".data/" in target or pruned(target, keep_moe)):
                    path = site / target
                    if not path.resolve().is_relative_to(site.resolve()):
                        raise ValueError(f"{wheel.name} contains {name}, which is outside the folder")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(name) as source, path.open("wb") as sink:
                        shutil.copyfileobj(source, sink)


def strip(site: Path) -> None:
    """Removes the symbols of the engine's own libraries."""
    for path in site.rglob("*.so"):
        if any(fnmatch.fnmatch(str(path.relative_to(site)), pattern) for pattern in STRIPPED):
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=True, timeout=300)


def pack(folder: Path, into: Path, *, keep_moe: bool = False, part_bytes: int = PART_BYTES) -> list[int]:
    """Packs the wheels of a folder in parts, each a folder of its own; returns their sizes in bytes."""
    site = into / "site"
    for old in (site, *into.glob("part-*")):
        shutil.rmtree(old, ignore_errors=True)
    install(folder, site, keep_moe)
    if shutil.which("strip"):
        strip(site)
    archive = into / "site.tar.xz"
    # xz uses all cores; the module does not.
    with archive.open("wb") as sink, subprocess.Popen(["xz", "-T0", "-6", "-c"], stdin=subprocess.PIPE, stdout=sink) as xz:
        assert xz.stdin is not None
        with tarfile.open(fileobj=xz.stdin, mode="w|") as tar:
            tar.add(site, arcname=".")
        xz.stdin.close()
    if xz.returncode:
        raise RuntimeError(f"xz ended with {xz.returncode}")
    shutil.rmtree(site)
    digests: list[str] = []
    sizes: list[int] = []
    with archive.open("rb") as source:
        while part := source.read(part_bytes):
            target = into / f"part-{len(sizes)}"
            target.mkdir()
            (target / "data").write_bytes(part)
            digests.append(hashlib.sha256(part).hexdigest())
            sizes.append(len(part))
    archive.unlink()
    for number in range(len(sizes)):
        manifest = {"number": number, "digests": digests, "moe": keep_moe}
        (into / f"part-{number}" / "manifest.json").write_text(json.dumps(manifest))
    return sizes


def unpack(parts: list[Path], site: Path) -> list[int]:
    """Keeps parts beside ``site``, and unpacks all when the last has arrived; returns the numbers of the parts that are missing.

    Raises ``ValueError`` for a part that is damaged, or that is of another pack than those before.
    """
    kept = site.with_name(site.name + ".parts")
    kept.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {}
    for part in parts:
        manifest = json.loads((part / "manifest.json").read_text())
        digests, number = manifest["digests"], manifest["number"]
        known = kept / "manifest.json"
        if known.exists() and json.loads(known.read_text())["digests"] != digests:
            raise ValueError(f"{part} is of another pack than the parts in {kept}; delete that folder to begin with another pack")
        data = (part / "data").read_bytes()
        if hashlib.sha256(data).hexdigest() != digests[number]:
            raise ValueError(f"{part} is damaged: its digest is not that of the manifest; send it again")
        (kept / str(number)).write_bytes(data)
        known.write_text(json.dumps(manifest))
    missing = [number for number in range(len(manifest["digests"])) if not (kept / str(number)).exists()]
    if not missing:
        paths = [kept / str(number) for number in range(len(manifest["digests"]))]
        with lzma.open(io.BufferedReader(Chain(paths))) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                tar.extractall(site, filter="data")
        shutil.rmtree(kept)
    return missing


class Chain(io.RawIOBase):
    """The contents of files, one after the other, as one file to read."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [path.open("rb") for path in paths]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._files:
            size = self._files[0].readinto(buffer)
            if size:
                return size
            self._files.pop(0).close()
        return 0


def install_wheel(wheel: Path, into: Path) -> None:
    """Unzips a wheel of this package, whose entry points vLLM finds in a folder of ``PYTHONPATH``."""
    shutil.rmtree(into, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)

"""Copies the Python modules of vLLM that tests/test_vllm.py tests with from its wheels to target/vllm/VERSION.

python tools/fetch_vllm.py 0.25.1 0.28.0 0.33.0

Downloads each wheel with pip, about 250 MB to 500 MB, and keeps some kB of it. `cargo xtask python` calls it.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(__file__).parents[1] / "target/vllm"
LOADER = "vllm/model_executor/model_loader/"
KEPT = (
    "vllm/distributed/weight_transfer/",
    "vllm/device_allocator/sleep_mode_backend.py",
    "vllm/v1/worker/gpu_worker.py",
    *(LOADER + name for name in ["base_loader.py", "mtp_validation.py", "reload/"]),
)
PLATFORMS = ["manylinux1_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64"]


def fetch(version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps", "--only-binary", ":all:"]
        platforms = [f"--platform={platform}" for platform in PLATFORMS]
        command = [*pip, "--python-version", "3.12", *platforms, "--dest", folder, f"vllm=={version}"]
        subprocess.run(command, check=True, timeout=900)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(KEPT) and name.endswith(".py")]
            archive.extractall(Path(folder) / "kept", names)
        TARGET.mkdir(parents=True, exist_ok=True)
        # A download that is interrupted leaves nothing that looks like a release.
        partial = TARGET / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(Path(folder) / "kept", partial)
        partial.rename(TARGET / version)


if __name__ == "__main__":
    for version in sys.argv[1:]:
        fetch(version)
        print(f"vLLM {version} is in {TARGET / version}")

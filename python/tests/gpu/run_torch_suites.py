"""Runs PyTorch's own tests of multiprocessing with stock PyTorch and with ``device_ipc.torch.install()``, and writes a table.

    python run_torch_suites.py SUITES OUT [--jobs 8] [--only REGEX] [--time-limit 330]

SUITES is a folder with test files of PyTorch (not part of this repository): ``test_multiprocessing.py``, and where there are,
``test_dataloader_cuda.py`` and ``test_p2p_ipc.py``. Each case runs in a process of its own, in each configuration:

========= ==================================================================================================
default   the allocator as it is
segments  ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``
confined  the same, as another user and without the system calls ptrace(2) and pidfd_getfd(2), as in a container
========= ==================================================================================================

A case that fails is tried once more when no other case runs; the second result counts, and the table marks it with ``*``. OUT gets
``table.md``, ``results.json`` and the output of every case that did not pass.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One configuration: with install(), and the kind of environment.
Configuration = tuple[bool, str]
CONFIGURATIONS: list[Configuration] = [
    (install, kind) for kind in ("default", "segments", "confined") for install in (False, True)
]
USER = 65534

DRIVER = """
import os, sys
sys.path.insert(0, os.environ["SUITES"])
if os.environ.get("WITH_INSTALL") == "1":
    import device_ipc.torch
    device_ipc.torch.install()
import {module} as _module
globals().update({{name: value for name, value in vars(_module).items() if not name.startswith("__")}})
if __name__ == "__main__":
    {main}
"""

UNITTEST = "import unittest; del load_tests; unittest.main()"
# These start one process for each device themselves.
CONTINUOUS = "_module.run_tests()"


def confine() -> None:
    """Becomes another user that may not trace processes. Runs between fork and exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    if libc.prctl(38, 1, 0, 0, 0) != 0:  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    load, equal, ret = 0x20, 0x15, 0x06
    refuse = 0x00050000 | 1  # SECCOMP_RET_ERRNO | EPERM
    # The numbers of ptrace and pidfd_getfd.
    denied = (101, 438) if os.uname().machine == "x86_64" else (117, 438)
    program = struct.pack("HBBI", load, 0, 0, 0)
    for at, number in enumerate(denied):
        program += struct.pack("HBBI", equal, len(denied) - at, 0, number)
    program += struct.pack("HBBI", ret, 0, 0, 0x7FFF0000) + struct.pack("HBBI", ret, 0, 0, refuse)
    buffer = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filter_ = Filter(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    if libc.prctl(22, 2, ctypes.byref(filter_), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


class Runner:
    def __init__(self, suites: Path, out: Path, folder: Path, limit: float) -> None:
        self.suites, self.out, self.folder, self.limit = suites, out, folder, limit
        self.end = time.monotonic() + limit
        out.joinpath("logs").mkdir(parents=True, exist_ok=True)

    def environment(self, configuration: Configuration) -> dict[str, str]:
        install, kind = configuration
        environment = {
            **os.environ,
            "SUITES": str(self.suites),
            "WITH_INSTALL": "1" if install else "0",
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "DEVICE_IPC_BACKEND": os.environ.get("DEVICE_IPC_BACKEND", "cuda"),
            "PYTHONFAULTHANDLER": "1",
            # The installed packages may have no compiled files, and be in a folder that cannot be written.
            "PYTHONPYCACHEPREFIX": str(self.folder / "pycache"),
        }
        if kind != "default":
            environment["PYTORCH_CUDA_ALLOC_CONF"] = environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        return environment

    def run(
        self, arguments: list[str], configuration: Configuration, timeout: float
    ) -> tuple[int | None, str, float]:
        """Returns the exit status (None after the timeout), the output and the seconds."""
        begin = time.monotonic()
        with tempfile.TemporaryFile(mode="w+", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=self.environment(configuration),
                start_new_session=True,
                preexec_fn=confine if configuration[1] == "confined" else None,
            )
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                # The stack of the main thread, by faulthandler.
                process.send_signal(signal.SIGABRT)
                time.sleep(1)
                status = None
            # Processes that the test has left behind.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            output.seek(0)
            return status, output.read(), time.monotonic() - begin

    def case(self, case: tuple[str, str], configuration: Configuration, timeout: float) -> dict[str, Any]:
        driver, name = case
        left = self.end - time.monotonic()
        if left < 5:
            return {"result": "no time", "seconds": 0.0}
        arguments = [str(self.folder / driver)] + ([name] if name else [])
        status, output, seconds = self.run(arguments, configuration, min(timeout, left))
        if status is None:
            result = "TIMEOUT"
        elif status != 0:
            result = "FAILED"
        elif re.search(r"^OK \(skipped=\d+\)$", output, re.MULTILINE) and "Ran 1 test" in output:
            result = "skipped"
        else:
            result = "passed"
        if result not in ("passed", "skipped"):
            install, kind = configuration
            log = f"{'install' if install else 'stock'}-{kind}-{driver[:-3]}-{name.rpartition('.')[2] or 'all'}.txt"
            self.out.joinpath("logs", log).write_text(output[-20000:])
        return {"result": result, "seconds": round(seconds, 1)}


def discover(runner: Runner, driver: str) -> list[str]:
    """Returns the names of the cases in a file."""
    code = (
        "import sys, unittest; sys.argv = ['x']; import runpy; m = runpy.run_path(sys.orig_argv[-1], run_name='found')\n"
        "for c in m.values():\n"
        "    if isinstance(c, type) and issubclass(c, unittest.TestCase) and c.__name__.startswith('Test') and c.__name__ != 'TestCase':\n"
        "        print(*(f'CASE {c.__name__}.{n}' for n in unittest.TestLoader().getTestCaseNames(c)), sep='\\n')\n"
    )
    status, output, _ = runner.run(["-c", code, str(runner.folder / driver)], (False, "default"), 120)
    cases = re.findall(r"^CASE (\S+)$", output, re.MULTILINE)
    if status != 0 or not cases:
        raise SystemExit(f"no cases in {driver}:\n{output}")
    return sorted(set(cases))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suites", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--only", default="", help="regular expression for the names of cases")
    parser.add_argument("--configurations", default="", help="regular expression for stock-default, install-segments, …")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one case")
    parser.add_argument("--time-limit", type=float, default=330, help="seconds for all cases")
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="torch-suites-"))
    folder.chmod(0o777)
    suites = folder / "suites"
    shutil.copytree(options.suites, suites)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    runner = Runner(suites, options.out, folder, options.time_limit)

    cases: list[tuple[str, str]] = []
    for module, main_ in (("test_multiprocessing", UNITTEST), ("test_dataloader_cuda", UNITTEST), ("test_p2p_ipc", CONTINUOUS)):
        if not suites.joinpath(f"{module}.py").exists():
            continue
        driver = f"drive_{module}.py"
        folder.joinpath(driver).write_text(DRIVER.format(module=module, main=main_))
        names = discover(runner, driver) if main_ is UNITTEST else [""]
        cases += [(driver, name) for name in names]
    cases = [case for case in cases if re.search(options.only, f"{case[0]} {case[1]}")]
    named: Callable[[Configuration], str] = lambda one: f"{'install' if one[0] else 'stock'}-{one[1]}"
    configurations = [one for one in CONFIGURATIONS if re.search(options.configurations, named(one))]

    jobs = [(case, one) for one in configurations for case in cases]
    results: dict[tuple[tuple[str, str], Configuration], dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(runner.case, case, one, options.timeout): (case, one) for case, one in jobs}
        for future in concurrent.futures.as_completed(futures):
            results[futures[future]] = future.result()
    for (case, one), result in sorted(results.items(), key=lambda item: item[0]):
        if result["result"] in ("FAILED", "TIMEOUT"):
            again = runner.case(case, one, options.timeout)
            results[case, one] = {**again, "result": f"{again['result']} *"}

    lines = ["| case | " + " | ".join(named(one) for one in configurations) + " |", "|---" * (len(configurations) + 1) + "|"]
    worse, missing = [], 0
    for case in cases:
        row = [results[case, one] for one in configurations]
        cells = [f"{result['result']} ({result['seconds']} s)" for result in row]
        name = case[1].rpartition(".")[2] or case[0][len("drive_") : -3]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        for one in configurations:
            stock, ours = results.get((case, (False, one[1]))), results[case, one]
            if "no time" in (ours["result"].removesuffix(" *"), stock and stock["result"].removesuffix(" *")):
                missing += one[0]
            elif one[0] and stock and stock["result"].startswith("passed") and not ours["result"].startswith("passed"):
                worse.append(f"{named(one)}: {name}: {ours['result']}")
    counts = {named(one): {} for one in configurations}  # type: dict[str, dict[str, int]]
    for (_, one), result in results.items():
        kind = result["result"].split(" ")[0]
        counts[named(one)][kind] = counts[named(one)].get(kind, 0) + 1
    text = "\n".join(lines) + "\n\n" + "\n".join(f"{name}: {count}" for name, count in counts.items())
    text += "\n\n" + ("\n".join(worse) if worse else "No case that passes with stock PyTorch fails with install().") + "\n"
    text += f"Not compared, because the time had ended: {missing} cases.\n" if missing else ""
    options.out.joinpath("table.md").write_text(text)
    plain = [{"case": f"{case[0]} {case[1]}", "configuration": named(one), **result} for (case, one), result in results.items()]
    options.out.joinpath("results.json").write_text(json.dumps(plain, indent=1))
    print(text)
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if worse or missing else 0


if __name__ == "__main__":
    sys.exit(main())

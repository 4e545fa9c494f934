"""vLLM's HTTP server in a process of its own, for the times of updates as users see them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .engine import not_ready

READY_SECONDS = 400.0


def request(url: str, body: Any = None) -> Any:
    """Returns the reply to a request: a GET without a body, else a POST."""
    data = None if body is None else json.dumps(body).encode()
    one = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(one, timeout=120) as reply:
        text = reply.read()
    return json.loads(text) if text else None


@contextlib.contextmanager
def started(folder: Path, name: str, model: Path, backend: str, *arguments: str, **variables: str) -> Iterator[str]:
    """Starts a server; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host=127.0.0.1", f"--port={port}"]
    command += ["--load-format=dummy", "--skip-tokenizer-init", "--enforce-eager", "--max-model-len=256", "--max-num-seqs=8"]
    # The share of the device that has to be free at the start.
    command += ["--gpu-memory-utilization=0.1", f"--kv-cache-memory-bytes={256 << 20}", "--worker-extension-cls=engines.worker.Extension"]
    command += [f"--weight-transfer-config={json.dumps({'backend': backend})}", *arguments]
    log = folder / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, **variables})
    url = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + READY_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(not_ready("the server", process.returncode, log))
            with contextlib.suppress(OSError):
                request(f"{url}/health")
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()

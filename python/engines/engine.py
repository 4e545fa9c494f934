"""An engine of vLLM in a process of its own, which answers calls over a Unix socket, one connection for each call.

So a trainer that is killed leaves nothing behind but a connection that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

READY_SECONDS = 240.0
CALL_SECONDS = 120.0
PROMPTS = [[5, 7, 11, 13, 17, 19], list(range(20, 84)), [3] * 9]


class Engine:
    """The client of one engine, which is also the client of ``WeightSender``."""

    def __init__(self, address: str) -> None:
        self.address = address

    def call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Calls a method of the engine. Raises ``RuntimeError`` with its error, and ``TimeoutError`` if there is no reply."""
        with Client(self.address, "AF_UNIX") as connection:
            connection.send((method, arguments))
            if not connection.poll(seconds):
                raise TimeoutError(f"{method}: no reply after {seconds} s")
            done, value = connection.recv()
        if not done:
            raise RuntimeError(f"{method}: {value}")
        return value

    def post(self, method: str, *arguments: Any) -> None:
        """Sends a call without waiting for its reply."""
        with Client(self.address, "AF_UNIX") as connection:
            connection.send((method, arguments))

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all workers."""
        found: list[Any] = self.call("collective_rpc", method, CALL_SECONDS, arguments)
        return found

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.call("finish_weight_update")

    def digests(self) -> list[dict[str, str]]:
        return self.rpc("engines_digests")

    def replayed(self) -> list[int]:
        return self.rpc("engines_replayed")

    def tokens(self, lora: str | None = None) -> Any:
        """Returns the tokens and the log-probabilities of greedy decoding, for all prompts."""
        return self.call("tokens", lora)


def options(model: Path, **further: Any) -> dict[str, Any]:
    """Returns the arguments of ``vllm.LLM`` for an engine with a small KV cache."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 256 << 20,
        # The cache has its size already. This is what has to be free at the start, beside other engines.
        "gpu_memory_utilization": 0.1,
        "seed": 0,
        "worker_extension_cls": "engines.worker.Extension",
        "weight_transfer_config": {"backend": "device_ipc"},
        **further,
    }


def not_ready(subject: str, status: int | None, log: Path) -> str:
    """Returns why a process serves nothing, with the last line of its log."""
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
    return f"{subject} {'is not ready' if status is None else f'ended with {status}'}: {last}; see {log}"


@contextlib.contextmanager
def started(
    folder: Path, name: str, arguments: dict[str, Any], module: str = "engines.engine", kind: type[Engine] = Engine, /, **variables: str
) -> Iterator[Engine]:
    """Starts an engine, whose process runs a module, and ends it with all its processes.

    Raises ``RuntimeError`` with the end of its log if it does not start.
    """
    # The path of a socket has 107 bytes at most.
    address = f"/tmp/device-ipc-engines-{os.getpid()}-{name}"
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", module, address, json.dumps(arguments)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, **variables})
    engine = kind(address)
    try:
        limit = time.monotonic() + READY_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(not_ready("the engine", process.returncode, log))
            with contextlib.suppress(OSError, EOFError):
                engine.call("ready")
                break
            time.sleep(0.2)
        yield engine
    finally:
        with contextlib.suppress(Exception):
            engine.post("exit")
        # Also one that has failed, and is writing its error to the log.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
        Path(address).unlink(missing_ok=True)


def answer_calls(address: str, answer: Callable[..., Any]) -> None:
    """Answers calls with what ``answer`` returns for a method and its arguments, until the parent asks the engine to exit."""
    with Listener(address, "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                try:
                    method, values = connection.recv()
                except (EOFError, OSError):
                    continue
                if method == "exit":
                    return
                reply: tuple[bool, Any]
                try:
                    reply = True, answer(method, *values)
                except Exception as error:
                    reply = False, f"{type(error).__name__}: {error}"
                # The caller may have been killed.
                with contextlib.suppress(OSError):
                    connection.send(reply)


def serve(address: str, arguments: dict[str, Any]) -> None:
    """Runs an engine until its parent asks it to exit."""
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1, ignore_eos=True, detokenize=False)

    def tokens(lora: str | None) -> Any:
        request = None
        if lora is not None:
            from vllm.lora.request import LoRARequest

            request = LoRARequest("adapter", 1, lora)
        llm.reset_prefix_cache()
        found = []
        for output in llm.generate([{"prompt_token_ids": list(ids)} for ids in PROMPTS], greedy, use_tqdm=False, lora_request=request):
            one = output.outputs[0]
            chosen = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [])]
            found.append((list(one.token_ids), chosen))
        return found

    def answer(method: str, *values: Any) -> Any:
        if method == "ready":
            return None
        if method == "tokens":
            return tokens(*values)
        value = getattr(llm, method)(*values)
        return value if method == "collective_rpc" else None

    answer_calls(address, answer)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

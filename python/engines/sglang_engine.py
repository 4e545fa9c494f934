"""An engine of SGLang in a process of its own, which answers calls as ``engines.engine`` does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .engine import PROMPTS, Engine, answer_calls

LOADER = "device_ipc.sglang.load_weights"
REPORTER = "engines.sglang_engine.report"


class SglangEngine(Engine):
    """The client of one engine."""

    def digests(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.call("digests")
        return found

    def tokens(self, lora: str | None = None) -> Any:
        return self.call("tokens")


def options(model: Path, **further: Any) -> dict[str, Any]:
    """Returns the arguments of ``sglang.Engine`` for an engine with a small KV cache."""
    return {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "disable_cuda_graph": True,
        "context_length": 256,
        "max_total_tokens": 8192,
        "mem_fraction_static": 0.15,
        # FlashAttention is 1 GiB, and not packed.
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "random_seed": 0,
        "custom_weight_loader": [LOADER, REPORTER],
        **further,
    }


def versions() -> dict[str, str]:
    """Returns the versions of what runs here."""
    import sglang
    import torch

    import device_ipc

    return {"sglang": str(sglang.__version__), "torch": str(torch.__version__), "device_ipc": str(device_ipc.__version__)}


def report(model: Any, named_tensors: Any) -> None:
    """Writes what a worker knows of its model to a file in a folder, whose name is the payload: a loader for ``--custom-weight-loader``."""
    ((_, folder),) = named_tensors
    loads = vars(model).get("device_ipc_loads")
    plan = None if loads is None else loads._plan
    with open(f"{bytes(folder.tolist()).decode()}/{os.getpid()}", "w") as file:
        json.dump({"copies": 0 if plan is None else plan.count()}, file)


class Calls:
    """What the suite asks of an engine. All replies are plain values."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def ready(self) -> None:
        """Returns when the engine runs."""

    def die(self) -> None:
        """Kills the processes of the engine, and then this one."""
        for pid in self._engine.get_all_child_pids():
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def versions(self) -> dict[str, str]:
        return versions()

    def update(self, *texts: str) -> None:
        """Loads the tensors of descriptors, one for all ranks or one for each."""
        import device_ipc.sglang

        done, reason = self._engine.update_weights_from_tensor(device_ipc.sglang.named_tensors(*texts), load_format=LOADER)[:2]
        if not done:
            raise RuntimeError(reason)

    def update_otherwise(self) -> str:
        """Returns the reason why an update that does not name the loader of this package is not done."""
        import device_ipc.sglang

        done, reason = self._engine.update_weights_from_tensor(device_ipc.sglang.named_tensors("nothing"))[:2]
        if done:
            raise RuntimeError("the update was done")
        return str(reason)

    def timed(self, count: int, text: str) -> list[float]:
        """Returns the milliseconds of updates from a descriptor."""
        return _timed(lambda: self.update(text), count)

    def timed_stock(self, count: int, config: dict[str, Any]) -> list[float]:
        """Returns the milliseconds of SGLang's own updates from tensors of this process."""
        import torch

        from . import models

        state = models.checkpoint(config, "cuda")
        models.fill(state, 0)
        torch.cuda.synchronize()

        def update() -> None:
            done, reason = self._engine.update_weights_from_tensor(list(state.items()))[:2]
            if not done:
                raise RuntimeError(reason)

        try:
            return _timed(update, count)
        finally:
            state.clear()
            torch.cuda.empty_cache()

    def replayed(self) -> list[int]:
        """Returns the number of copies of the last load's plan in each worker, or 0 if it has none."""
        import device_ipc.sglang

        with tempfile.TemporaryDirectory() as folder:
            self._engine.update_weights_from_tensor(device_ipc.sglang.named_tensors(folder), load_format=REPORTER)
            return [json.loads(path.read_text())["copies"] for path in sorted(Path(folder).iterdir())]

    def digests(self) -> list[dict[str, str]]:
        """Returns SGLang's own checksums of all tensors, for each rank."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        checked = self._engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action="checksum"))
        done, reason, ranks = self._engine.loop.run_until_complete(checked)[:3]
        if not done:
            raise RuntimeError(reason)
        return [dict(rank["checksums"]) for rank in ranks]

    def tokens(self) -> Any:
        """Returns the tokens and the log-probabilities of greedy decoding, for all prompts."""
        self._engine.flush_cache()
        greedy = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
        found = []
        for prompt in PROMPTS:
            output = self._engine.generate(input_ids=list(prompt), sampling_params=greedy, return_logprob=True)
            found.append((list(output["output_ids"]), [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]))
        return found

    def resources(self) -> dict[str, int]:
        """Returns the descriptors and mappings of the processes of the engine."""
        found = {"descriptors": 0, "mappings": 0}
        for pid in self._engine.get_all_child_pids():
            with contextlib.suppress(OSError):
                found["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
                found["mappings"] += len(Path(f"/proc/{pid}/maps").read_text().splitlines())
        return found

    def release(self, tags: list[str] | None) -> None:
        self._engine.release_memory_occupation(tags)

    def resume(self, tags: list[str] | None) -> None:
        self._engine.resume_memory_occupation(tags)


def _timed(function: Any, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1000)
    return times


def serve(address: str, arguments: dict[str, Any]) -> None:
    """Runs an engine until its parent asks it to exit."""
    import sglang

    engine = sglang.Engine(**arguments)
    calls = Calls(engine)
    answer_calls(address, lambda method, *values: getattr(calls, method)(*values))
    engine.shutdown()


# The processes that SGLang spawns import this module.
if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

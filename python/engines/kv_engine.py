"""An engine of vLLM in one process, which prefills or decodes for another one, and answers calls like ``engine``.

The scheduler and the worker are in this process too, so a kill ends all of it, and calls can ask for free blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from . import engine

# vLLM reads it at its import.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

LOGPROBS = 2
RESULT_SECONDS = 90.0


class Engine(engine.Engine):
    """The client of one engine."""

    pid: int = 0

    def submit(self, requests: list[dict[str, Any]]) -> None:
        """Adds requests, each with ``name``, ``prompt``, ``count`` of tokens, and ``params`` for the transfer or None."""
        self.call("submit", requests)

    def results(self) -> list[dict[str, Any]]:
        """Waits until a request has ended; returns all that have ended since the last call."""
        found: list[dict[str, Any]] = self.call("results", seconds=RESULT_SECONDS)
        return found

    def gather(self, names: set[str]) -> dict[str, dict[str, Any]]:
        """Waits for requests to end."""
        found: dict[str, dict[str, Any]] = {}
        while not names <= set(found):
            found |= {one["name"]: one for one in self.results()}
        return found

    def abort(self, names: list[str]) -> None:
        self.call("abort", names)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("state")
        return found

    def until_idle(self, seconds: float = 60.0) -> dict[str, Any]:
        """Waits until the engine has no requests and no blocks that it keeps for another engine; returns its state."""
        found: dict[str, Any] = self.call("idle", seconds, seconds=seconds + 10)
        return found


@contextlib.contextmanager
def started(folder: Path, name: str, arguments: dict[str, Any], **variables: str) -> Iterator[Engine]:
    """Starts an engine, and ends it."""
    with engine.started(folder, name, arguments, "engines.kv_engine", **variables) as one:
        found = Engine(one.address)
        found.pid = found.call("pid")
        yield found


def event() -> Any:
    """Returns an event of the device that has a time."""
    import torch

    kind: Any = torch.cuda.Event
    return kind(enable_timing=True)


def numbers(text: str, skipped: int, count: int) -> list[int]:
    """Returns block numbers of a load."""
    found: list[int] = []
    for at in range(0, len(text), 16):
        first, steps = int(text[at : at + 8], 16), int(text[at + 8 : at + 16], 16)
        found += range(first, first + steps) if steps < 1 << 31 else range(first, first - (1 << 32) + steps, -1)
    return found[skipped : skipped + count]


class Reader:
    """A reader of blocks whose calls are timed."""

    def __init__(self, reader: Any, copies: list[Any], counters: Counters) -> None:
        self._reader, self._copies, self._counters = reader, copies, counters

    def submit(self, loads: list[Any]) -> Any:
        begin = time.perf_counter()
        found = self._reader.submit(loads)
        end = time.perf_counter()
        parts = self._counters.parts
        parts["submit"] = parts.get("submit", 0.0) + end - begin
        self._counters.copies += [(self._copies, load[2]) for load in loads]
        self._counters.counting += time.perf_counter() - end
        return Submitted(found, self._counters)


class Submitted:
    """Copies of a reader. Waits for their end are not counted as the host's work."""

    def __init__(self, copies: Any, counters: Counters) -> None:
        self._copies = copies
        self._counters = counters

    def query(self, seconds: float = 0.0) -> Any:
        found = self._copies.query()
        if found is None and seconds:
            begin = time.perf_counter()
            found = self._copies.query(seconds)
            waited = time.perf_counter() - begin
            self._counters.parts["wait"] = self._counters.parts.get("wait", 0.0) + waited
            self._counters.counting += waited
        return found


SCHEDULER_METHODS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished",
    "request_finished_all_groups",
)  # fmt: skip


class Counters:
    """What the connector has done in this process, and the host's time in it."""

    def __init__(self) -> None:
        self.loads = self.blocks = self.preempted = self.polls = 0
        self.failed = 0
        self.host: dict[str, float] = {}
        """Seconds by method, without those of the counting."""
        self.parts: dict[str, float] = {}
        """Seconds of parts of these methods."""
        self.counting = 0.0
        self.copies: list[tuple[list[Any], list[Any]]] = []
        """What was copied since ``take``."""
        self.began: dict[str, float] = {}
        self.came: dict[str, float] = {}
        self.nixl: dict[str, list[float]] = {}

    def watch(self, connector: Any, scheduler: Any) -> None:
        """Counts and times the calls of a connector's two halves."""
        from device_ipc import _kv_cache, _native

        native: Any = _native
        reader = native._BlockReader
        native._BlockReader = lambda queue, copies, claims: Reader(reader(queue, copies, claims), copies, self)
        kind: Any = _kv_cache.CacheImporter
        end = kind._end

        def counted_end(importer: Any, peer: Any, loads: list[Any], failures: list[Any], *lists: Any) -> None:
            end(importer, peer, loads, failures, *lists)
            entered = time.perf_counter()
            failed = dict(failures)
            begun = [load for position, load in enumerate(loads) if position not in failed]
            self.loads += len(begun)
            self.blocks += sum(len(destinations) // 4 for load in begun for _, _, destinations in load[2])
            self.counting += time.perf_counter() - entered

        kind._end = counted_end
        for target, names in (
            (connector, ("start_load_kv", "get_finished", "get_block_ids_with_load_errors")),
            (scheduler.connector, SCHEDULER_METHODS),
        ):
            for name in names:
                if hasattr(target, name):
                    self._time(target, name)
        for name in ("begin", "check"):
            self._time_part(_kv_cache._Peer, name)
        preempt = scheduler._preempt_request

        def preempted(*arguments: Any, **named: Any) -> Any:
            self.preempted += 1
            return preempt(*arguments, **named)

        scheduler._preempt_request = preempted
        stats = connector.get_kv_connector_stats

        def counted_stats() -> Any:
            found = stats()
            self._count_nixl(getattr(found, "data", None) or {})
            return found

        connector.get_kv_connector_stats = counted_stats

    def _count_nixl(self, data: dict[str, Any]) -> None:
        for name, values in data.items():
            if isinstance(values, list):
                self.nixl.setdefault(name, []).extend(values)
            else:
                # Of a connector in a MultiConnector.
                self._count_nixl(getattr(values, "data", None) or {})

    def _time(self, target: Any, name: str) -> None:
        call = getattr(target, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            counting = self.counting
            begin = time.perf_counter()
            found = call(*arguments, **named)
            end = time.perf_counter()
            self.host[name] = self.host.get(name, 0.0) + end - begin - (self.counting - counting)
            if name == "get_finished":
                self.polls += 1
                for request in found[1] or ():
                    self.came[request] = end
            elif name == "get_block_ids_with_load_errors":
                self.failed += len(found)
            elif name == "update_state_after_alloc" and arguments[2] > 0:
                self.began[arguments[0].request_id] = end
            return found

        setattr(target, name, timed)

    def _time_part(self, target: Any, name: str) -> None:
        call = getattr(target, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            found = call(*arguments)
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - begin
            return found

        setattr(target, name, timed)

    def copy_again(self, count: int = 5) -> float | None:
        """Returns the seconds of the copies since ``take`` on the device: makes them again, between blocks that nothing else uses."""
        import torch

        sleep: Any = torch.cuda._sleep
        times = []
        blocks = [
            (copy, numbers(text, skipped, len(destinations) // 4), array("I", destinations))
            for copies, parts in self.copies
            for copy, (text, skipped, destinations) in zip(copies, parts, strict=True)
        ]
        for _ in range(count if blocks else 0):
            begin, end = event(), event()
            torch.cuda.synchronize()
            # The device begins when the host has submitted everything.
            sleep(2_000_000)
            begin.record()
            for copy, sources, destinations in blocks:
                copy.copy(sources, destinations)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times) if times else None

    def take(self) -> dict[str, Any]:
        """Returns what was measured since the last call."""
        found: dict[str, Any] = {
            "host": self.host, "parts": self.parts, "polls": self.polls, "nixl": self.nixl,
            "transfers": [self.came[name] - self.began[name] for name in self.began if name in self.came],
            "blocks": sum(len(destinations) // 4 for _, parts in self.copies for _, _, destinations in parts),
        }  # fmt: skip
        self.host, self.parts, self.polls = {}, {}, 0
        self.copies, self.began, self.came, self.nixl = [], {}, {}, {}
        return found


class Served:
    """The engine itself."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.engine: Any = LLM(**arguments).llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.counters = Counters()
        if self.scheduler.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.counters.watch(get_kv_transfer_group(), self.scheduler)
        self.begun: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.ended: list[dict[str, Any]] = []

    def submit(self, requests: list[dict[str, Any]]) -> None:
        from vllm import SamplingParams

        for one in requests:
            extra = None if one["params"] is None else {"kv_transfer_params": one["params"]}
            sampling = SamplingParams(
                temperature=0.0, max_tokens=one["count"], logprobs=LOGPROBS, ignore_eos=True, detokenize=False, extra_args=extra
            )
            self.begun[one["name"]] = time.perf_counter()
            self.engine.add_request(one["name"], {"prompt_token_ids": one["prompt"]}, sampling)

    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def step(self) -> None:
        for output in self.engine.step():
            name, one = output.request_id, output.outputs[0]
            if one.token_ids:
                self.first.setdefault(name, time.perf_counter())
            if not output.finished:
                continue
            begun, first = self.begun.pop(name), self.first.pop(name, None)
            tops = [sorted((entry.logprob for entry in entries.values()), reverse=True) for entries in one.logprobs or []]
            self.ended.append({
                "name": name, "tokens": list(one.token_ids), "reason": one.finish_reason, "params": output.kv_transfer_params,
                "logprobs": [entries[token].logprob for token, entries in zip(one.token_ids, one.logprobs or [])],
                "gaps": [top[0] - top[1] if len(top) > 1 else 0.0 for top in tops],
                "cached": output.num_cached_tokens or 0, "first": None if first is None else first - begun,
            })  # fmt: skip

    def state(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        free, counters = pool.get_num_free_blocks(), self.counters
        return {
            "free": free, "blocks": pool.num_gpu_blocks, "requests": len(self.scheduler.requests), "loads": counters.loads,
            "loaded blocks": counters.blocks, "failed blocks": counters.failed, "preempted": counters.preempted,
            "groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
        }  # fmt: skip

    def one_copy(self, nbytes: int, source_device: int, count: int = 12) -> float:
        """Returns the seconds of one contiguous copy to the engine's device, from a device of this process."""
        import torch

        target, source = (torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}") for device in (0, source_device))
        times = []
        for _ in range(count):
            begin, end = event(), event()
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        del target, source
        torch.cuda.empty_cache()
        return float(statistics.median(times[2:]))

    def answer(self, method: str, values: Any) -> Any:
        if method in ("submit", "state", "one_copy"):
            return getattr(self, method)(*values)
        if method == "abort":
            return self.engine.abort_request(*values)
        if method in ("take", "copy_again"):
            return getattr(self.counters, method)()
        if method == "collective_rpc":
            return self.engine.collective_rpc(*values)
        if method == "reset_prefix_cache":
            return bool(self.engine.reset_prefix_cache())
        if method in ("ready", "pid"):
            return os.getpid()
        raise ValueError(f"there is no method {method!r}")


def serve(address: str, arguments: dict[str, Any]) -> None:
    """Runs an engine until its parent asks it to exit: steps while there is something to do, and calls between the steps."""
    from multiprocessing.connection import wait

    served = Served(arguments)
    waiting: list[Connection] = []
    idle: list[tuple[Connection, float]] = []

    def reply(connection: Connection, value: tuple[bool, Any]) -> None:
        # The caller may have been killed.
        with contextlib.suppress(OSError):
            connection.send(value)
        connection.close()

    with Listener(address, "AF_UNIX", backlog=16) as listener:
        socket: Any = listener._listener._socket  # type: ignore[attr-defined]
        while True:
            while wait([socket], 0 if served.busy() else 1.0):
                try:
                    connection = listener.accept()
                    method, values = connection.recv()
                except (EOFError, OSError):
                    continue
                if method == "exit":
                    served.engine.engine_core.shutdown()
                    return
                if method == "results":
                    waiting.append(connection)
                elif method == "idle":
                    idle.append((connection, time.monotonic() + values[0]))
                else:
                    try:
                        reply(connection, (True, served.answer(method, values)))
                    except Exception as error:
                        reply(connection, (False, f"{type(error).__name__}: {error}"))
                if served.ended or idle:
                    break
            if served.busy():
                served.step()
            if served.ended and waiting:
                ended, served.ended = served.ended, []
                reply(waiting.pop(0), (True, ended))
            for one in idle[:]:
                if not served.busy() or time.monotonic() > one[1]:
                    idle.remove(one)
                    reply(one[0], (True, {**served.state(), "idle": not served.busy()}))


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

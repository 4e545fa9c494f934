"""The cases. Each runs in a process of its own, which is also the trainer; its engines are further processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import carry, engine, models, server, trainer
from .common import (
    SLACK,
    check,
    devices,
    filled,
    follow_versions,
    gigabytes,
    kept,
    lines,
    median_ms,
    milliseconds,
    needs_memory,
    pooled,
    timed_versions,
    with_one_copy,
)
from .suite import Skipped, case

WAYS: dict[str, dict[str, Any]] = {"export": {}, "kept": {"keep_export": True}, "buckets": {"bucket_bytes": 8 << 20}}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
GOALS = {"kept": 22.0, "export": 32.0, "buckets": 40.0}
"""Milliseconds for an update of 16 GB over HTTP on one H200."""


def sender(client: Any, **options: Any) -> Any:
    import device_ipc.vllm

    return device_ipc.vllm.WeightSender(client, timeout=60, **options)


@contextlib.contextmanager
def updated(
    folder: Path, name: str, config: dict[str, Any], further: dict[str, Any] | None = None, **variables: str
) -> Iterator[engine.Engine]:
    """Starts an engine whose weights have no meaning until an update."""
    arguments = engine.options(models.write(config, folder / f"{name}-model"), **(further or {}))
    with engine.started(folder, name, arguments, **variables) as one:
        yield one


def loaded(folder: Path, config: dict[str, Any], state: dict[str, Any], further: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Returns the checksums and the tokens of an engine that has loaded the weights from a file."""
    model = models.write(config, folder / "file-model", state)
    with engine.started(folder, "file", engine.options(model, **{**(further or {}), "load_format": "safetensors"})) as one:
        return one.digests(), one.tokens()


def is_replayed(one: engine.Engine, expected: bool) -> int:
    copies = one.replayed()
    assert all(bool(count) == expected for count in copies), f"copies of the recorded load in each worker: {copies}, expected {expected}"
    return min(copies)


@case("import", 180.0)
def imports(folder: Path) -> dict[str, Any]:
    """vLLM is imported, finds this package, and starts an engine; the versions"""
    with updated(folder, "engine", models.SMALL) as one:
        return dict(one.rpc("engines_versions")[0])


@case("update-export", 600.0, way="export")
@case("update-kept", 600.0, way="kept")
@case("update-buckets", 600.0, way="buckets")
def update(folder: Path, way: str, config: Any = models.SMALL, further: Any = None, replayed: bool = True) -> dict[str, Any]:
    """Three updates, of which two are replayed: checksums, tokens and log-probabilities are those of an engine with the same file"""
    state = filled(config)
    with updated(folder, "engine", config, further) as one, contextlib.closing(sender(one, **WAYS[way])) as source:
        for step in range(3):
            models.fill(state, step)
            source.send(state.items())
        copies = is_replayed(one, replayed)
        digests, tokens = one.digests(), one.tokens()
    expected_digests, expected_tokens = loaded(folder, config, state, further)
    for found, expected in zip(digests, expected_digests, strict=True):
        check(found, expected, "checksums of the parameters")
    check(tokens, expected_tokens, "tokens and log-probabilities")
    return {"parameters": len(digests[0]), "copies": copies, "tokens": sum(len(one[0]) for one in tokens)}


@case("replay-export", way="export")
@case("replay-kept", way="kept")
@case("replay-buckets", way="buckets")
def replay(folder: Path, way: str) -> dict[str, Any]:
    """After each of four updates, an engine that replays loads has the checksums of one that does not"""
    state = filled(models.SMALL)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(updated(folder, name, models.SMALL, DEVICE_IPC_REPLAY_LOADS=name)) for name in ("1", "0")]
        senders = [stack.enter_context(contextlib.closing(sender(one, **WAYS[way]))) for one in engines]
        for step in range(4):
            models.fill(state, step)
            for source in senders:
                source.send(state.items())
            check(engines[0].digests()[0], engines[1].digests()[0], f"checksums after update {step}")
        assert engines[1].replayed() == [0]
        return {"copies": is_replayed(engines[0], True)}


@case("graphs", 600.0)
def graphs(folder: Path) -> dict[str, Any]:
    """With CUDA graphs of decoding, the tokens after replayed updates are those of an engine with the same file"""
    return update(folder, "export", further=GRAPHS)


@case("tied", 600.0)
def tied(folder: Path) -> dict[str, Any]:
    """Tied embeddings: one parameter with two names"""
    return update(folder, "export", config=models.TIED)


@case("fp8", 600.0)
def fp8(folder: Path) -> dict[str, Any]:
    """vLLM's online quantisation to fp8, which is no copy: the load is not replayed, and the weights are those of the file"""
    return update(folder, "export", further={"quantization": "fp8"}, replayed=False)


@case("moe", 600.0)
def moe(folder: Path) -> dict[str, Any]:
    """A mixture of experts, if vLLM's kernels for it were packed"""
    import vllm

    if not (Path(vllm.__file__).parents[1] / carry.MOE).exists():
        raise Skipped("vLLM's kernels for mixtures of experts are not here; pack with --moe")
    return update(folder, "export", config=models.MIXTURE)


@case("tp2", 600.0)
def tp2(folder: Path) -> dict[str, Any]:
    """Tensor parallel on two devices: each rank records its part, and has the checksums of one with the same file"""
    devices(2)
    return update(folder, "export", further={"tensor_parallel_size": 2, "disable_custom_all_reduce": True})


@case("other-layout")
def other_layout(folder: Path) -> dict[str, Any]:
    """Updates in another order, and with float32, are recorded again"""
    import torch

    state = filled(models.SMALL)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(updated(folder, "replay", models.SMALL))
        other = stack.enter_context(updated(folder, "normal", models.SMALL, DEVICE_IPC_REPLAY_LOADS="0"))
        senders = [stack.enter_context(contextlib.closing(sender(each))) for each in (one, other)]
        seed = 0
        for change in (lambda pairs: pairs, lambda pairs: pairs[::-1], lambda pairs: [(name, tensor.float()) for name, tensor in pairs]):
            for _ in range(2):
                seed += 1
                models.fill(state, seed)
                pairs = change(list(state.items()))
                for source in senders:
                    source.send(pairs)
                check(one.digests()[0], other.digests()[0], f"checksums after update {seed}")
                torch.cuda.synchronize()
        return {"copies": is_replayed(one, True)}


@case("flat-export", way="export")
@case("flat-kept", way="kept")
@case("flat-buckets", way="buckets")
def flat(folder: Path, way: str) -> dict[str, Any]:
    """After 20 updates, device memory, descriptors and mappings are as after the fourth"""
    state = filled(models.SMALL)
    with updated(folder, "engine", models.SMALL) as one, contextlib.closing(sender(one, **WAYS[way])) as source:
        found = []
        for step in range(20):
            source.send(state.items())
            if step in (3, 19):
                found.append(one.rpc("engines_resources")[0])
        early, late = found
        grown = {name: late[name] - early[name] for name in early}
        assert grown["descriptors"] <= 1 and grown["mappings"] <= 4 and grown["memory"] <= SLACK, f"grown: {grown}"
        return grown


@case("sleep-1", level=1)
@case("sleep-2", level=2)
def sleep(folder: Path, level: int) -> dict[str, Any]:
    """An engine that slept gets its weights by an update, which is replayed; those of level 1 come back by themselves"""
    state = filled(models.SMALL)
    with updated(folder, "engine", models.SMALL, {"enable_sleep_mode": True}) as one, contextlib.closing(sender(one)) as source:
        for step in range(2):
            models.fill(state, step)
            source.send(state.items())
        digests, tokens = one.digests(), one.tokens()
        for step in range(2):
            one.call("sleep", level)
            one.call("wake_up", ["weights"])
            if level == 1:
                check(one.digests()[0], digests[0], "checksums after waking")
            source.send(state.items())
            one.call("wake_up", ["kv_cache"])
            check(one.digests()[0], digests[0], "checksums after the update")
            check(one.tokens(), tokens, "tokens after the update")
        return {"copies": is_replayed(one, True)}


@case("killed-export", 900.0, way="export")
@case("killed-buckets", 900.0, way="buckets")
def killed(folder: Path, way: str) -> dict[str, Any]:
    """A trainer killed at each moment of an update: the engine lives, its memory returns, and the next trainer's second update is right"""
    config = models.SMALL
    state = filled(config, 7)
    bucket_bytes = WAYS[way].get("bucket_bytes", 0)
    with updated(folder, "engine", config) as one:
        with contextlib.closing(sender(one, **WAYS[way])) as source:
            for _ in range(2):
                source.send(state.items())
        digests = one.digests()[0]
        before = one.rpc("engines_resources")[0]
        for moment in trainer.MOMENTS:
            command = [sys.executable, "-m", "engines.trainer", one.address, json.dumps(config), "8", moment, str(bucket_bytes)]
            with (folder / f"{moment}.log").open("wb") as log:
                status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120).returncode
            assert status == -9, f"{moment}: the trainer ended with {status}; see {moment}.log"
            with contextlib.closing(sender(one, **WAYS[way])) as source:
                # The first update ends that of the trainer that was killed, and may fail with it.
                with contextlib.suppress(Exception):
                    source.send(state.items())
                source.send(state.items())
            check(one.digests()[0], digests, f"checksums after a trainer was killed {moment}")
            after = one.rpc("engines_resources")[0]
            assert after["memory"] - before["memory"] <= SLACK, f"{moment}: device memory grew by {after['memory'] - before['memory']} B"
        return {"moments": len(trainer.MOMENTS)}


@case("lora", 600.0)
def lora(folder: Path) -> dict[str, Any]:
    """An update leaves a LoRA adapter as it was"""
    import torch
    from safetensors.torch import save_file

    adapter, rank, hidden = folder / "adapter", 8, models.SMALL["hidden_size"]
    adapter.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["o_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for number in range(models.SMALL["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{number}.self_attn.o_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=torch.Generator().manual_seed(number)) * 0.2
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(hidden, rank, generator=torch.Generator().manual_seed(number + 99)) * 0.2
    save_file(tensors, adapter / "adapter_model.safetensors")
    state = filled(models.SMALL)
    further = {"enable_lora": True, "max_lora_rank": rank}
    with updated(folder, "engine", models.SMALL, further) as one, contextlib.closing(sender(one)) as source:
        source.send(state.items())
        plain, adapted = one.tokens(), one.tokens(str(adapter))
        assert plain != adapted, "the adapter has no effect"
        for seed in (1, 0):
            models.fill(state, seed)
            source.send(state.items())
        check(one.tokens(), plain, "tokens without the adapter")
        check(one.tokens(str(adapter)), adapted, "tokens with the adapter")
        return {"copies": min(one.replayed())}


def in_place(model: Path, name: str, further: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """Returns the arguments of an engine whose weights are in place."""
    source = {"source": f"keeper:{name}", "in_place": True, "timeout": 120.0, **extra}
    return engine.options(model, **{**(further or {}), "load_format": "device_ipc", "model_loader_extra_config": source})


@case("in-place", 900.0, config=models.SMALL)
@case("in-place-tied", 900.0, config=models.TIED)
@case("in-place-tp2", 900.0, config=models.SMALL, ranks=2)
def in_place_engines(folder: Path, config: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """Engines with one copy of the weights, one of them with CUDA graphs: those of the file; then new versions, and the first engine killed"""
    import device_ipc.vllm

    devices(ranks)
    parallel = {"tensor_parallel_size": ranks, "disable_custom_all_reduce": True} if ranks > 1 else {}
    state = filled(config)
    digests, tokens = loaded(folder, config, state, parallel)
    model, name = models.write(config, folder / "model", state), f"engines-{os.getpid()}"
    with kept(name), contextlib.ExitStack() as stack:
        first_stack = stack.enter_context(contextlib.ExitStack())
        options = in_place(model, name, parallel, publish=True, load_format="safetensors")
        first = first_stack.enter_context(engine.started(folder, "first", options))
        second = stack.enter_context(engine.started(folder, "second", in_place(model, name, {**parallel, **GRAPHS})))
        for one in (first, second):
            for found, expected in zip(one.digests(), digests, strict=True):
                check(found, expected, "checksums of the parameters")
            check(one.tokens(), tokens, "tokens and log-probabilities")
        ordinary = stack.enter_context(updated(folder, "ordinary", config, parallel))
        senders = [stack.enter_context(contextlib.closing(sender(one, keep_export=True))) for one in (second, ordinary)]

        def send() -> None:
            for source in senders:
                source.send(state.items())

        expected = follow_versions(state, 4, send, [first, second], [first, second], device_ipc.vllm.follow, ordinary)
        first_stack.close()
        check(second.tokens(), expected, "tokens after the first engine has ended")
        return {"parameters": len(digests[0]), "copies": is_replayed(second, True)}


@case("in-place-large", 1200.0)
def in_place_large(folder: Path) -> dict[str, Any]:
    """Device memory and times of three engines with one copy of 16 GB, and of new weights for them"""
    import device_ipc.vllm

    needs_memory(75)
    model, name = models.write(models.LARGE, folder / "model"), f"engines-{os.getpid()}"

    def start(further: dict[str, Any], engine_name: str) -> contextlib.AbstractContextManager[engine.Engine]:
        return engine.started(folder, engine_name, in_place(model, name, further, publish=True, load_format="dummy"))

    with kept(name), contextlib.ExitStack() as stack:
        engines, found = with_one_copy(folder, [functools.partial(start, further) for further in ({}, {}, GRAPHS)], stack)
        check(engines[2].digests(), engines[0].digests(), "checksums")
        with pooled(models.LARGE) as state, contextlib.closing(sender(engines[0], keep_export=True)) as source:
            found |= timed_versions(lambda: source.send(state.items()), engines, device_ipc.vllm.follow)
            check(engines[2].digests(), engines[0].digests(), "checksums after updates")
    return found


@case("in-place-sleep-1", 900.0, level=1)
@case("in-place-sleep-2", 900.0, level=2)
@case("in-place-sleep-tp2", 900.0, level=1, ranks=2)
def in_place_sleep(folder: Path, level: int, ranks: int = 1) -> dict[str, Any]:
    """An engine with CUDA graphs sleeps and wakes beside another one, with the same weights and then with newer ones: tokens and memory"""
    import device_ipc.vllm

    devices(ranks)
    parallel = {"tensor_parallel_size": ranks, "disable_custom_all_reduce": True} if ranks > 1 else {}
    state = filled(models.SMALL)
    digests, tokens = loaded(folder, models.SMALL, state, parallel)
    model, name = models.write(models.SMALL, folder / "model", state), f"engines-{os.getpid()}"
    found: dict[str, Any] = {"GB before": gigabytes()}
    with kept(name), contextlib.ExitStack() as stack:
        first = stack.enter_context(
            engine.started(folder, "first", in_place(model, name, parallel, publish=True, load_format="safetensors"))
        )
        further = {**parallel, **GRAPHS, "enable_sleep_mode": True}
        second = stack.enter_context(engine.started(folder, "second", in_place(model, name, further)))
        check(second.tokens(), tokens, "tokens before the first sleep")
        found["GB awake"] = gigabytes()
        for _ in range(3):
            second.call("sleep", level)
            found["GB asleep"] = gigabytes()
            check(first.tokens(), tokens, "tokens of the engine that is awake")
            found["wake weights ms"] = milliseconds(lambda: second.call("wake_up", ["weights"]))
            check(second.digests(), digests, "checksums after waking")
            found["wake KV cache ms"] = milliseconds(lambda: second.call("wake_up", ["kv_cache"]))
            check(second.tokens(), tokens, "tokens after waking")
        freed = found["GB awake"] - found["GB asleep"]
        assert freed > 0.2, f"sleep has freed {freed} GB: {found}"
        ordinary = stack.enter_context(updated(folder, "ordinary", models.SMALL, parallel))
        senders = [stack.enter_context(contextlib.closing(sender(one))) for one in (first, ordinary)]
        for step in range(1, 4):
            second.call("sleep", level)
            models.fill(state, step)
            for source in senders:
                source.send(state.items())
            device_ipc.vllm.follow(first)
            second.call("wake_up")
            check(second.digests(), ordinary.digests(), f"checksums after waking with version {step}")
            check(second.tokens(), ordinary.tokens(), f"tokens after waking with version {step}")
        found["weights mapped again"] = lines(folder, "second", "mapped again after ")
    return found


@case("in-place-sleep-large", 1200.0)
def in_place_sleep_large(folder: Path) -> dict[str, Any]:
    """Memory of an engine that sleeps with 16 GB in place, and the time until it has them again"""
    needs_memory(60)
    model, name = models.write(models.LARGE, folder / "model"), f"engines-{os.getpid()}"
    found: dict[str, Any] = {"GB before": gigabytes()}
    with kept(name), contextlib.ExitStack() as stack:
        further = {**GRAPHS, "enable_sleep_mode": True, "kv_cache_memory_bytes": 4 << 30}
        for number in range(2):
            options = in_place(model, name, further, publish=True, load_format="dummy")
            one = stack.enter_context(engine.started(folder, f"engine{number}", options))
            found[f"GB with {number + 1} engines"] = gigabytes()
        digests, tokens = one.digests(), one.tokens()
        times: dict[str, list[float]] = {"sleep ms": [], "wake weights ms": [], "wake KV cache ms": []}
        for level in (1, 2) * 4:
            times["sleep ms"].append(milliseconds(functools.partial(one.call, "sleep", level)))
            found[f"GB asleep at level {level}"] = gigabytes()
            times["wake weights ms"].append(milliseconds(lambda: one.call("wake_up", ["weights"])))
            times["wake KV cache ms"].append(milliseconds(lambda: one.call("wake_up", ["kv_cache"])))
        check(one.digests(), digests, "checksums after waking")
        check(one.tokens(), tokens, "tokens after waking")
        found |= {what: statistics.median(values) for what, values in times.items()}
        found["weights mapped again"] = lines(folder, "engine1", "mapped again after ")
        mapped = statistics.median(float(text.split(" ms")[0]) for text in found["weights mapped again"])
        assert mapped <= 10, f"the weights are mapped again after {mapped} ms: {found}"
    return found


@case("in-place-kv-sizing", 1200.0)
def in_place_kv_sizing(folder: Path) -> dict[str, Any]:
    """KV caches that vLLM sizes: an engine that publishes has that of a stock engine, another one the bytes of the weights more"""
    import torch

    needs_memory(75)
    model, name = models.write(models.LARGE, folder / "model"), f"engines-{os.getpid()}"
    # The cache is what remains of this part of the device.
    further = {"gpu_memory_utilization": 30e9 / torch.cuda.mem_get_info()[1], "kv_cache_memory_bytes": None}
    weights = sum(2 * torch.Size(shape).numel() for shape in models.shapes(models.LARGE).values())
    found: dict[str, Any] = {"GB of weights": weights / 1e9}
    with engine.started(folder, "stock", engine.options(model, **further)) as one:
        stock = one.rpc("engines_cache")[0]["cache"]
    with kept(name), contextlib.ExitStack() as stack:
        caches = []
        for number in range(2):
            options = in_place(model, name, further, publish=True, load_format="dummy")
            one = stack.enter_context(engine.started(folder, f"engine{number}", options))
            caches.append(one.rpc("engines_cache")[0]["cache"])
        found |= {"GB of KV, stock": stock / 1e9, "publishing": caches[0] / 1e9, "second": caches[1] / 1e9}
        for cache, expected in zip(caches, (stock, stock + weights), strict=True):
            assert abs(cache - expected) <= 1 << 30, f"a KV cache of {cache / 1e9:.2f} GB, expected about {expected / 1e9:.2f}: {found}"
    return found


@case("in-place-draft", 900.0)
def in_place_draft(folder: Path) -> dict[str, Any]:
    """A draft model of speculative decoding has memory of its own beside a target in place; tokens are those of the target alone"""
    state = filled(models.SMALL)
    model, name = models.write(models.SMALL, folder / "model", state), f"engines-{os.getpid()}"
    draft = models.write(models.SMALL, folder / "draft", filled(models.SMALL, 1))
    _, tokens = loaded(folder, models.SMALL, state)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    with kept(name), contextlib.ExitStack() as stack:
        for number in range(2):
            options = in_place(model, name, {"speculative_config": speculation}, publish=True, load_format="safetensors")
            one = stack.enter_context(engine.started(folder, f"engine{number}", options))
            # Log-probabilities are those of other batches.
            check([found for found, _ in one.tokens()], [expected for expected, _ in tokens], f"tokens of engine {number}")
            in_place_lines = lines(folder, f"engine{number}", "in place in")
            assert len(in_place_lines) == 1, f"only the target is in place: {in_place_lines}"
    return {"engines": 2}


@case("update-graph-replay", 600.0, config=models.LARGE)
@case("update-graph-replay-small", 300.0, config=models.SMALL)
def graph_replay(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Times of a recorded load's copies: separate, as they are replayed; as one list; and by a CUDA graph of the separate ones"""
    import torch

    if config is models.LARGE:
        needs_memory(40)
    with pooled(config) as state:
        # Of the fused parameters of vLLM's model, and the parts of them that tensors become.
        targets = torch.empty(sum(one.numel() for one in state.values()), dtype=torch.bfloat16, device="cuda")
        parts, offset = [], 0
        for tensor in state.values():
            parts.append((targets[offset : offset + tensor.numel()].view(tensor.shape), tensor))
            offset += tensor.numel()

        def separate() -> None:
            for part, tensor in parts:
                part.copy_(tensor, non_blocking=True)

        def listed() -> None:
            torch._foreach_copy_([part for part, _ in parts], [tensor for _, tensor in parts], non_blocking=True)

        ways: dict[str, Any] = {"separate": separate, "list": listed}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            separate()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            separate()
        ways["graph"] = graph.replay
        found: dict[str, Any] = {"copies": len(parts), "GB": targets.nbytes / 1e9}
        source = torch.empty_like(targets)
        ways["one copy"] = lambda: targets.copy_(source)
        for _ in range(2):
            for name, way in ways.items():
                host, total, device = [], [], []
                for _ in range(20):
                    torch.cuda.synchronize()
                    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                    begin = time.perf_counter()
                    begun.record()
                    way()
                    ended.record()
                    host.append((time.perf_counter() - begin) * 1000)
                    torch.cuda.synchronize()
                    total.append((time.perf_counter() - begin) * 1000)
                    device.append(begun.elapsed_time(ended))
                for what, times in (("host", host), ("device", device), ("total", total)):
                    found[f"{name} {what} ms"] = statistics.median(times)
        found["gain of the graph"] = 1 - found["graph total ms"] / found["separate total ms"]
        return found


def timed(folder: Path, config: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns the medians of updates over HTTP, by each way, replayed and not, and of one copy on the device."""
    import torch

    import device_ipc.vllm

    found: dict[str, Any] = {}
    model = models.write(config, folder / "model")
    with pooled(config) as state:
        found["GB"] = sum(tensor.nbytes for tensor in state.values()) / 1e9
        for switch, name in (("1", "replayed"), ("0", "normal")):
            with server.started(folder, name, model, "device_ipc", DEVICE_IPC_REPLAY_LOADS=switch) as url:
                for way in WAYS:
                    options = {"bucket_bytes": 1 << 30} if way == "buckets" and config is models.LARGE else WAYS[way]
                    with contextlib.closing(sender(device_ipc.vllm.HTTPClient(url), **options)) as source:
                        for _ in range(2):
                            source.send(state.items())
                        found[f"{way} {name} ms"] = median_ms(lambda: source.send(state.items()), count)
                digests = server.request(f"{url}/collective_rpc", {"method": "engines_digests"})["results"][0]
            check(digests, found.setdefault("digests", digests), "checksums after the updates of the two servers")
        del found["digests"]
        largest = max(state.values(), key=lambda tensor: tensor.nbytes)
        target = torch.empty_like(largest)
        target.copy_(largest)
        scale = found["GB"] * 1e9 / largest.nbytes

        def copy() -> None:
            target.copy_(largest)
            torch.cuda.synchronize()

        found["one copy ms"] = median_ms(copy, count) * scale
    return found


@case("times-small", 900.0)
def times_small(folder: Path) -> dict[str, Any]:
    """Times of updates of a small model over HTTP, replayed and not"""
    return timed(folder, models.SMALL, 10)


@case("times-large", 1800.0)
def times_large(folder: Path) -> dict[str, Any]:
    """Times of updates of 16 GB over HTTP, replayed and not, and of one copy of them on the device"""
    needs_memory(60)
    found = timed(folder, models.LARGE, 10)
    found["above the goal"] = {way: found[f"{way} replayed ms"] for way, goal in GOALS.items() if found[f"{way} replayed ms"] > goal}
    return found


@case("stock-large", 1200.0, config=models.LARGE)
@case("stock-small", 600.0, config=models.SMALL)
def stock(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Times of updates by vLLM's own backend ipc over HTTP, plain and packed"""
    if config is models.LARGE:
        needs_memory(60)
    # Its module imports Ray, also where Ray is not used.
    stub = folder.resolve() / "stub" / "ray"
    stub.mkdir(parents=True, exist_ok=True)
    (stub / "__init__.py").touch()
    sys.path.insert(0, str(stub.parent))
    path = os.pathsep.join([str(stub.parent), os.environ.get("PYTHONPATH", "")])
    variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONPATH": path}
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    state = filled(config)
    found: dict[str, Any] = {"GB": sum(tensor.nbytes for tensor in state.values()) / 1e9}
    with server.started(folder, "server", models.write(config, folder / "model"), "ipc", **variables) as url:
        server.request(f"{url}/init_weight_transfer_engine", {"init_info": {}})
        for packed in (False, True):

            def send() -> None:
                server.request(f"{url}/start_weight_update", {})
                IPCWeightTransferEngine.trainer_send_weights(iter(state.items()), {"send_mode": "http", "url": url, "packed": packed})
                server.request(f"{url}/finish_weight_update", {})

            for _ in range(2):
                send()
            found["packed ms" if packed else "ipc ms"] = median_ms(send, 10)
            gc.collect()
    return found

"""The cases of SGLang. Each runs in a process of its own, which is also the trainer; its engines are further processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import engine, models, sglang_engine
from .common import (
    SLACK,
    check,
    filled,
    follow_versions,
    gigabytes,
    kept,
    lines,
    milliseconds,
    needs_memory,
    pooled,
    timed_versions,
    with_one_copy,
)
from .suite import case

GRAPHS = {"disable_cuda_graph": False, "disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 4}


@contextlib.contextmanager
def started(folder: Path, name: str, model: Path, further: dict[str, Any] | None = None, **variables: str) -> Iterator[engine.Engine]:
    arguments = sglang_engine.options(model, **(further or {}))
    with engine.started(folder, name, arguments, "engines.sglang_engine", sglang_engine.SglangEngine, **variables) as one:
        yield one


def send(one: engine.Engine, *states: dict[str, Any]) -> None:
    """Sends weights, one block for each state dict."""
    import device_ipc.sglang

    for state in states:
        with device_ipc.sglang.share(state) as update:
            one.call("update", *(str(export.descriptor) for export in update.exports))


def loaded(folder: Path, config: dict[str, Any], state: dict[str, Any], further: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Returns the checksums and the tokens of an engine that has loaded the weights from a file."""
    model = models.write(config, folder / "file-model", state)
    with started(folder, "file", model, {**(further or {}), "load_format": "safetensors"}) as one:
        return one.digests(), one.tokens()


@case("sglang-import", 400.0)
def imports(folder: Path) -> dict[str, Any]:
    """SGLang is imported, and starts an engine; the versions"""
    with started(folder, "engine", models.write(models.SMALL, folder / "model")) as one:
        return dict(one.call("versions"))


@case("sglang-update", 900.0)
@case("sglang-tied", 900.0, config=models.TIED)
@case("sglang-parts", 900.0, parts=3)
@case("sglang-graphs", 900.0, further=GRAPHS)
def update(folder: Path, config: Any = models.SMALL, parts: int = 1, further: Any = None) -> dict[str, Any]:
    """Three updates: checksums, tokens and log-probabilities are those of an engine with the same file"""
    state = filled(config)
    with started(folder, "engine", models.write(config, folder / "model"), further) as one:
        for step in range(3):
            models.fill(state, step)
            names = list(state)
            send(one, *({name: state[name] for name in names[part::parts]} for part in range(parts)))
        digests, tokens = one.digests(), one.tokens()
    expected_digests, expected_tokens = loaded(folder, config, state, further)
    for found, expected in zip(digests, expected_digests, strict=True):
        check(found, expected, "checksums of the tensors")
    check(tokens, expected_tokens, "tokens and log-probabilities")
    return {"tensors": len(digests[0]), "tokens": sum(len(one[0]) for one in tokens)}


@case("sglang-replay", 900.0)
def replay(folder: Path) -> dict[str, Any]:
    """After each of eight updates in two orders, an engine that replays loads has the checksums of one that does not"""
    state = filled(models.SMALL)
    model = models.write(models.SMALL, folder / "model")
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(started(folder, name, model, DEVICE_IPC_REPLAY_LOADS=name)) for name in ("1", "0")]
        copies = []
        for step in range(8):
            models.fill(state, step)
            # Two orders, each twice in a row, and then again.
            pairs = list(state.items())[:: 1 if step % 4 < 2 else -1]
            for one in engines:
                send(one, dict(pairs))
            found = [one.digests() for one in engines]
            check(found[0][0], found[1][0], f"checksums after update {step}")
            copies.append(min(engines[0].call("replayed")))
        assert all(copies), f"copies of the last load's plan after each update: {copies}"
        assert not any(engines[1].call("replayed"))
        return {"copies": copies[-1], "tensors": len(found[0][0])}


@case("sglang-times", 1500.0, config=models.LARGE, memory=60)
@case("sglang-times-small", 900.0, config=models.SMALL, memory=8)
def times(folder: Path, config: dict[str, Any], memory: int) -> dict[str, Any]:
    """Times of updates, replayed and not: of one export, of an export for each, and of SGLang's own from tensors"""
    import torch

    import device_ipc.sglang

    needs_memory(memory)
    model, found = models.write(config, folder / "model"), {}
    further = {"mem_fraction_static": 0.6}
    with pooled(config) as state:
        found["GB"] = sum(tensor.nbytes for tensor in state.values()) / 1e9
        for switch, name in (("1", "replayed"), ("0", "normal")):
            with started(folder, name, model, further, DEVICE_IPC_REPLAY_LOADS=switch) as one:
                for _ in range(2):
                    send(one, state)
                fresh = sglang_engine._timed(lambda: send(one, state), 10)
                with device_ipc.sglang.share(state) as update:
                    (export,) = update.exports
                    kept = one.call("timed", 12, str(export.descriptor))[2:]
                copies, digests = one.call("replayed"), one.digests()
                assert all(copies) == (switch == "1"), f"copies of the last load's plan: {copies}"
                check(digests, found.setdefault("digests", digests), "checksums of the engine that replays and of the one that does not")
                for what, values in (("an export for each", fresh), ("one export", kept)):
                    found[f"{what}, {name} ms"] = statistics.median(values)
                    found[f"{what}, {name}, lowest and highest"] = [round(min(values), 1), round(max(values), 1)]
    del found["digests"]
    state.clear()
    torch.cuda.empty_cache()
    with started(folder, "stock", model, further) as one:
        stock = one.call("timed_stock", 12, config)[2:]
    found["SGLang's own ms"] = statistics.median(stock)
    found["SGLang's own, lowest and highest"] = [round(min(stock), 1), round(max(stock), 1)]
    return found


@case("sglang-flat", 600.0)
def flat(folder: Path) -> dict[str, Any]:
    """After 20 updates, device memory, descriptors and mappings are as after the fourth"""
    state = filled(models.SMALL)
    with started(folder, "engine", models.write(models.SMALL, folder / "model")) as one:
        found = []
        for step in range(20):
            send(one, state)
            if step in (3, 19):
                found.append({**one.call("resources"), "memory": int(gigabytes() * 1e9)})
        early, late = found
        grown = {name: late[name] - early[name] for name in early}
        assert grown["descriptors"] <= 2 and grown["mappings"] <= 8 and grown["memory"] <= SLACK, f"grown: {grown}"
        return grown


@case("sglang-sleep", 900.0)
def sleep(folder: Path) -> dict[str, Any]:
    """An engine that has released its memory gets its weights by an update"""
    state = filled(models.SMALL)
    with started(folder, "engine", models.write(models.SMALL, folder / "model"), {"enable_memory_saver": True}) as one:
        send(one, state)
        digests, tokens = one.digests(), one.tokens()
        found: dict[str, Any] = {"GB awake": gigabytes()}
        for _ in range(2):
            one.call("release", None)
            found["GB released"] = gigabytes()
            one.call("resume", ["weights"])
            send(one, state)
            one.call("resume", ["kv_cache"])
            check(one.digests(), digests, "checksums after the update")
            check(one.tokens(), tokens, "tokens after the update")
        assert found["GB released"] < found["GB awake"], f"nothing was released: {found}"
        return found


def from_keeper(name: str, further: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """Returns the arguments of an engine whose weights a keeper has."""
    config = json.dumps({"source": f"keeper:{name}", "timeout": 120.0, **extra})
    return {"log_level": "info", **(further or {}), "load_format": "device_ipc", "model_loader_extra_config": config}


@case("sglang-keeper", 900.0)
def keeper(folder: Path) -> dict[str, Any]:
    """An engine that copies its weights from a keeper when it starts has those of the file"""
    import device_ipc

    state, name = filled(models.SMALL), f"engines-{os.getpid()}"
    digests, tokens = loaded(folder, models.SMALL, state)
    with device_ipc.keep(name, device_ipc.share(state)):
        with started(folder, "engine", models.write(models.SMALL, folder / "model"), from_keeper(name)) as one:
            check(one.digests(), digests, "checksums of the tensors")
            check(one.tokens(), tokens, "tokens and log-probabilities")
    return {"tensors": len(digests[0])}


@case("sglang-in-place", 1500.0, config=models.SMALL)
@case("sglang-in-place-tied", 1500.0, config=models.TIED)
def in_place(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Engines with one copy of the weights, one of them with CUDA graphs: those of the file; also after the first engine was killed"""
    state = filled(config)
    model, name = models.write(config, folder / "model", state), f"engines-{os.getpid()}"
    with kept(name), concurrent.futures.ThreadPoolExecutor(1) as threads, contextlib.ExitStack() as stack:
        expected = threads.submit(loaded, folder, config, state)
        first_stack = stack.enter_context(contextlib.ExitStack())
        options = from_keeper(name, in_place=True, publish=True, load_format="safetensors")
        first = first_stack.enter_context(started(folder, "first", model, options))
        digests, tokens = expected.result()
        # The other engines read no files.
        (model / "model.safetensors").unlink()
        second = stack.enter_context(started(folder, "second", model, from_keeper(name, GRAPHS, in_place=True)))
        for one in (first, second):
            check(one.digests(), digests, "checksums of the tensors")
            check(one.tokens(), tokens, "tokens and log-probabilities")
        with contextlib.suppress(EOFError, OSError):
            first.call("die")
        first_stack.close()
        check(second.tokens(), tokens, "tokens after the first engine was killed")
        third = stack.enter_context(started(folder, "third", model, from_keeper(name, in_place=True)))
        check(third.digests(), digests, "checksums of an engine that was started later")
        check(third.tokens(), tokens, "tokens of an engine that was started later")
    return {"tensors": len(digests[0]), "in place": [lines(folder, one, "in place in ") for one in ("first", "second", "third")]}


@case("sglang-in-place-refused", 900.0)
def in_place_refused(folder: Path) -> dict[str, Any]:
    """An engine of another element type is refused with the first difference, and so are updates of a part and otherwise; the first engine answers as before"""
    state = filled(models.SMALL)
    model, name = models.write(models.SMALL, folder / "model", state), f"engines-{os.getpid()}"
    with kept(name), started(folder, "first", model, from_keeper(name, in_place=True, publish=True, load_format="safetensors")) as first:
        tokens = first.tokens()
        otherwise = first.call("update_otherwise")
        try:
            send(first, dict(list(state.items())[::2]))
        except RuntimeError as error:
            part = str(error)
        else:
            raise AssertionError("an update of a part of the weights was not refused")
        check(first.tokens(), tokens, "tokens after updates were refused")
        try:
            with started(folder, "other", model, from_keeper(name, {"dtype": "float16"}, in_place=True)):
                raise AssertionError("an engine with another manifest has started")
        except RuntimeError:
            refused = lines(folder, "other", "the kept weights have another ")
        assert refused, "the log has no refusal"
        check(first.tokens(), tokens, "tokens after the refusal")
    return {"refused": refused[0], "otherwise": otherwise, "part": part}


def follow(name: str, one: engine.Engine) -> None:
    """Has an engine in place take the present version of its keeper."""
    one.call("update", f"keeper:{name}")


@case("sglang-in-place-updates", 1800.0)
def in_place_updates(folder: Path) -> dict[str, Any]:
    """Three versions that one engine publishes and another one with CUDA graphs takes: those of an engine with the usual updates, and with the file"""
    state = filled(models.SMALL)
    model, name = models.write(models.SMALL, folder / "model", state), f"engines-{os.getpid()}"
    with kept(name), contextlib.ExitStack() as stack:
        first = stack.enter_context(started(folder, "first", model, from_keeper(name, in_place=True, publish=True, load_format="safetensors")))
        second = stack.enter_context(started(folder, "second", model, from_keeper(name, GRAPHS, in_place=True)))
        ordinary = stack.enter_context(started(folder, "ordinary", models.write(models.SMALL, folder / "ordinary-model")))

        def publish() -> None:
            for one in (first, ordinary):
                send(one, state)

        tokens = follow_versions(state, 3, publish, [first, second], [second], functools.partial(follow, name), ordinary)
        third = stack.enter_context(started(folder, "third", model, from_keeper(name, in_place=True)))
        digests, expected = loaded(folder, models.SMALL, state)
        for one in (first, second, third):
            check(one.digests(), digests, "checksums of the last version")
            check(one.tokens(), expected, "tokens of the last version")
        check(tokens, expected, "tokens of the ordinary engine")
        # Three versions in one go, of which the second engine takes the last.
        for step in range(4, 7):
            models.fill(state, step)
            publish()
        for one in (second, third):
            follow(name, one)
            check(one.digests(), ordinary.digests(), "checksums after versions that were skipped")
    published = lines(folder, "first", "the next version of ")
    assert ["replayed" in line for line in published] == [False] + [True] * 5, f"loads: {published}"
    return {"published": published, "took": lines(folder, "second", "the present version of ")}


@case("sglang-in-place-sleep", 1200.0)
def in_place_sleep(folder: Path) -> dict[str, Any]:
    """An engine with CUDA graphs releases its memory and resumes it beside another one, with the same weights and then with newer ones"""
    state = filled(models.SMALL)
    model, name = models.write(models.SMALL, folder / "model", state), f"engines-{os.getpid()}"
    with kept(name), contextlib.ExitStack() as stack:
        options = from_keeper(name, {"enable_memory_saver": True}, in_place=True, publish=True, load_format="safetensors")
        first = stack.enter_context(started(folder, "first", model, options))
        second = stack.enter_context(started(folder, "second", model, from_keeper(name, {**GRAPHS, "enable_memory_saver": True}, in_place=True)))
        digests, tokens = first.digests(), first.tokens()
        found: dict[str, Any] = {"GB awake": gigabytes()}
        for step in range(4):
            # The engine that has published, and has tensors of its own; then the one with graphs, which also skips versions.
            one, other = (first, second) if step == 0 else (second, first)
            one.call("release", None)
            found["GB released"] = gigabytes()
            check(other.tokens(), tokens, "tokens of the engine that is awake")
            if step > 1:
                models.fill(state, step)
                send(other, state)
                digests, tokens = other.digests(), other.tokens()
            found["resume weights ms"] = milliseconds(functools.partial(one.call, "resume", ["weights"]))
            one.call("resume", ["kv_cache", "cuda_graph"])
            check(one.digests(), digests, "checksums after the weights were resumed")
            check(one.tokens(), tokens, "tokens after the weights were resumed")
        assert found["GB released"] < found["GB awake"], f"nothing was released: {found}"
        found["mapped again"] = [lines(folder, each, "are mapped again after ") for each in ("first", "second")]
    return found


@case("sglang-in-place-large", 1500.0)
def in_place_large(folder: Path) -> dict[str, Any]:
    """Device memory and times of three engines with one copy of 16 GB, and of new weights for them; the checksums of the first and the last"""
    import device_ipc.sglang

    needs_memory(75)
    model, name = models.write(models.LARGE, folder / "model"), f"engines-{os.getpid()}"

    def start(further: dict[str, Any], engine_name: str) -> contextlib.AbstractContextManager[engine.Engine]:
        options = from_keeper(name, {"mem_fraction_static": 0.5, **further}, in_place=True, publish=True, load_format="dummy")
        return started(folder, engine_name, model, options)

    with kept(name), contextlib.ExitStack() as stack:
        engines, found = with_one_copy(folder, [functools.partial(start, further) for further in ({}, {}, GRAPHS)], stack)
        for number in range(len(engines)):
            found[f"load {number}"] = [line.split(",")[0] for line in lines(folder, f"engine{number}", "Load weight end. ")]
        check(engines[2].digests(), engines[0].digests(), "checksums")
        check(engines[2].tokens(), engines[0].tokens(), "tokens")
        with pooled(models.LARGE) as state, device_ipc.sglang.share(state) as update:
            (export,) = update.exports
            text = str(export.descriptor)
            found |= timed_versions(lambda: engines[0].call("update", text), engines[1:], functools.partial(follow, name))
            check(engines[2].digests(), engines[0].digests(), "checksums after updates")
            check(engines[2].tokens(), engines[0].tokens(), "tokens after updates")
        found["published"] = lines(folder, "engine0", "the next version of ")[-3:]
        for number in range(len(engines)):
            found[f"took {number}"] = lines(folder, f"engine{number}", "the present version of ")[-3:]
    return found

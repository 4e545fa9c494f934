"""The cases of SGLang. Each runs in a process of its own, which is also the trainer; its engines are further processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import engine, models, sglang_engine
from .common import SLACK, check, filled, gigabytes
from .suite import case

GRAPHS = {"disable_cuda_graph": False, "disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 4}


@contextlib.contextmanager
def started(folder: Path, name: str, model: Path, further: dict[str, Any] | None = None) -> Iterator[engine.Engine]:
    arguments = sglang_engine.options(model, **(further or {}))
    with engine.started(folder, name, arguments, "engines.sglang_engine") as one:
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
        return one.call("digests"), one.call("tokens")


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
        digests, tokens = one.call("digests"), one.call("tokens")
    expected_digests, expected_tokens = loaded(folder, config, state, further)
    for found, expected in zip(digests, expected_digests, strict=True):
        check(found, expected, "checksums of the tensors")
    check(tokens, expected_tokens, "tokens and log-probabilities")
    return {"tensors": len(digests[0]), "tokens": sum(len(one[0]) for one in tokens)}


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
        digests, tokens = one.call("digests"), one.call("tokens")
        found: dict[str, Any] = {"GB awake": gigabytes()}
        for _ in range(2):
            one.call("release", None)
            found["GB released"] = gigabytes()
            one.call("resume", ["weights"])
            send(one, state)
            one.call("resume", ["kv_cache"])
            check(one.call("digests"), digests, "checksums after the update")
            check(one.call("tokens"), tokens, "tokens after the update")
        assert found["GB released"] < found["GB awake"], f"nothing was released: {found}"
        return found

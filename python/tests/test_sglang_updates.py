"""New weights of SGLang's engines in place, and the release of their memory, on the mock: as test_sglang_in_place.py."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.sglang as ds
import device_ipc.torch as dt
import frameworks
import sglang_engine
from sglang_engine import SIZE
from test_sglang import CARRIED, VERSION, answer
from test_sglang_in_place import PROGRAM, Process, ask, in_place, send

Engines = Callable[[int], "list[Process]"]

AT_ONCE = 30
"""Seconds on a loaded machine; the limit of the engines' waits is a multiple of that."""
SHAPES = {"gate": (SIZE, SIZE), "up": (SIZE, SIZE), "embed": (SIZE, SIZE), "norm": (SIZE,)}


@pytest.fixture(scope="module", params=[CARRIED, VERSION])
def processes(request: pytest.FixtureRequest) -> "Iterator[tuple[str, list[Process]]]":
    frameworks.wheel("sglang", request.param)
    started: "list[Process]" = []
    yield request.param, started
    for one in started:
        one.kill()
        one.communicate(timeout=30)


@pytest.fixture
def engines(processes: "tuple[str, list[Process]]") -> Engines:
    """Returns processes that load one model after the other: importing torch takes seconds."""
    version, started = processes

    def take(count: int) -> "list[Process]":
        for number in range(count):
            if number == len(started) or started[number].poll() is not None:
                # Tensors of an update that outlive it are an error.
                command = [sys.executable, "-u", "-W", "error::ResourceWarning", str(PROGRAM), version]
                new = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                if number < len(started):
                    started[number].communicate(timeout=30)
                started[number : number + 1] = [new]
        return started[:count]

    return take


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"sglang-{os.getpid()}-{abs(hash(request.node.name))}"


def ask_all(ranks: "list[Process]", *requests: Any) -> "list[Any]":
    """Asks all ranks of an engine at the same time; one request for each, or one for all."""
    for number, one in enumerate(ranks):
        send(one, requests[number % len(requests)])
    return [answer(one) for one in ranks]


def loaded(name: str, kind: "str | None", *, publish: bool, rank: int = 0, ranks: int = 1, group: str = "", **changes: Any) -> Any:
    """Returns the request to load a model."""
    kinds = {} if kind is None else {"kind": kind}
    extra = {"publish": True, "load_format": "dummy"} if publish else {}
    request = in_place(name, **extra)
    request[2] = {**kinds, "tp_size": ranks, "tp_rank": rank, **({"group": group} if group else {}), **changes}
    return request


def start_ranks(processes: "list[Process]", name: str, group: str, publish: bool) -> None:
    requests = [loaded(name, "plain", publish=publish, rank=rank, ranks=2, group=group) for rank in range(2)]
    assert ask_all(processes, *requests) == ["ready"] * 2


def weights(seed: int) -> "dict[str, Any]":
    torch.manual_seed(seed)
    return {name: dt.empty(list(shape), torch.bfloat16, "mock:0").copy_(torch.rand(shape)) for name, shape in SHAPES.items()}


def readers(keeper: ds.WeightKeeper) -> "list[int]":
    """Returns the number of processes that have the present version of each rank mapped."""
    return [sum(holder.state == "in use" for holder in export.holders()) for export in keeper.exports]


def expected(state: "dict[str, Any]", kind: str = "plain") -> Any:
    """Returns the answer of a model that has loaded a state dict in the usual way."""
    sglang_engine.context["kind"] = kind
    model = sglang_engine.Model()
    model.load_weights(state.items())
    return json.loads(json.dumps(model.answer()))


SUCCESS = [True, "Success"]


def test_engines_take_new_weights_at_the_addresses_of_the_former(engines: Engines, name: str) -> None:
    first, second, third = engines(3)
    keeper = {"update": [f"keeper:{name}"]}
    with ds.WeightKeeper(name) as kept:
        assert ask(first, loaded(name, "plain", publish=True)) == ask(second, loaded(name, "plain", publish=False)) == "ready"
        former, addresses = ask(second), ask(second, {"facts": None})[0]
        assert ask(second, keeper) == SUCCESS and ask(second) == former, "there is no newer version"
        for step in range(4):
            state = weights(step)
            with device_ipc.share(state) as export:
                assert ask(first, {"update": [str(export)]}) == SUCCESS
            now = expected(state)
            assert ask(first) == now and ask(second) == former
            assert ask(second, keeper) == SUCCESS
            assert ask(second) == now
            former = now
        found, loads, _ = ask(second, {"facts": None})
        assert found == addresses and loads == 0
        assert ask(first, {"facts": None})[1] == 1, "later loads are replayed"
        # Either engine publishes, and one that starts later has the present version.
        with device_ipc.share(weights(9)) as export:
            assert ask(second, {"update": [str(export)]}) == SUCCESS
        assert ask(third, loaded(name, "plain", publish=False)) == "ready"
        assert ask(first, keeper) == SUCCESS
        assert ask(first) == ask(second) == ask(third) == expected(weights(9))
        assert readers(kept) == [3]


def test_tensors_of_another_keeper_are_published(engines: Engines, name: str) -> None:
    (first,) = engines(1)
    state = weights(3)
    with ds.WeightKeeper(name), device_ipc.keep(f"{name}-files", device_ipc.share(state)):
        assert ask(first, loaded(name, "plain", publish=True)) == "ready"
        assert ask(first, {"update": [f"keeper:{name}-files"]}) == SUCCESS
        assert ask(first) == expected(state)


@pytest.mark.parametrize("kind", ["plain", "derived", None])
def test_loads_that_cannot_be_published_change_nothing(engines: Engines, name: str, kind: "str | None") -> None:
    first, second = engines(2)
    with ds.WeightKeeper(name) as kept:
        assert ask(first, loaded(name, kind, publish=True)) == ask(second, loaded(name, kind, publish=False)) == "ready"
        former = ask(first)
        versions = [str(export.descriptor) for export in kept.exports]
        state = weights(1)
        if kind == "plain":
            del state["up"]
        with device_ipc.share(state) as export:
            for one in (first, second, first):
                done, reason = ask(one, {"update": [str(export)]})
                # Processed weights have another shape than those of the checkpoint.
                assert not done and ("recorded as copies alone" in reason or kind is None and "RuntimeError" in reason), reason
                assert ask(one) == former
        done, reason = ask(first, {"update": [str(export)]})
        assert not done and reason.startswith("StaleError")
        assert versions == [str(export.descriptor) for export in kept.exports]
        assert ask(first, {"update": [f"keeper:{name}"]}) == SUCCESS and ask(first) == former


def test_all_ranks_take_a_version(engines: Engines, name: str) -> None:
    first, second = (ranks := engines(4))[:2], ranks[2:]
    with ds.WeightKeeper(name):
        start_ranks(first, name, "first", True)
        start_ranks(second, name, "second", False)
        for step in range(2):
            states = [weights(10 * step), weights(10 * step + 1)]
            # One state dict for each rank.
            with ds.share(*states) as update:
                texts = [str(export) for export in update.exports]
                assert ask_all(first, {"update": texts}) == [SUCCESS] * 2
            now = [expected(state) for state in states]
            assert ask_all(first, "") == now
            assert ask_all(second, {"update": [f"keeper:{name}"]}) == [SUCCESS] * 2
            assert ask_all(second, "") == now


@pytest.mark.parametrize("dies", [False, True])
def test_no_rank_takes_a_version_that_another_cannot_take(engines: Engines, name: str, dies: bool) -> None:
    first, second = (ranks := engines(4))[:2], ranks[2:]
    with ds.WeightKeeper(name):
        start_ranks(first, name, "first", True)
        start_ranks(second, name, "second", False)
        former, state = ask_all(second, ""), weights(5)
        with device_ipc.share(state) as export:
            assert ask_all(first, {"update": [str(export)]}) == [SUCCESS] * 2
        assert ask(second[1], {"broken": dies}) is None
        begin = time.monotonic()
        for one in second:
            send(one, {"update": [f"keeper:{name}"]})
        done, reason = answer(second[0])
        assert time.monotonic() - begin < AT_ONCE and not done
        if dies:
            assert reason.startswith("GoneError") and "which has rank 1, has ended" in reason
            second[1].wait(timeout=30)
            assert ask(second[0]) == former[0]
            return
        # The rank that answers names the error of the other.
        assert reason.startswith("GoneError") and "rank 1 has failed: ArithmeticError: this rank maps nothing" in reason
        assert answer(second[1]) == [False, "ArithmeticError: this rank maps nothing"]
        assert ask_all(second, "") == former
        assert ask_all(second, {"update": [f"keeper:{name}"]}) == [SUCCESS] * 2
        assert ask_all(second, "") == [expected(state)] * 2


def test_no_rank_publishes_what_another_cannot_load(engines: Engines, name: str) -> None:
    ranks = engines(2)
    with ds.WeightKeeper(name) as kept:
        start_ranks(ranks, name, "one", True)
        former = ask_all(ranks, "")
        good, bad = weights(1), weights(2)
        with ds.share(bad) as update:
            stale = str(update.exports[0])
        with ds.share(good) as update:
            (mine,) = update.exports
            # The rank that fails is there before the other.
            send(ranks[1], {"update": [str(mine), stale]})
            deadline = time.monotonic() + AT_ONCE
            while not any(1 in group.members for group in list(kept._groups.values())):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            send(ranks[0], {"update": [str(mine), stale]})
            first, second = (answer(one) for one in ranks)
        assert not first[0] and "rank 1 has failed: StaleError" in first[1]
        assert not second[0] and second[1].startswith("StaleError")
        assert ask_all(ranks, "") == former
        with ds.share(good) as update:
            assert ask_all(ranks, {"update": [str(update.exports[0])]}) == [SUCCESS] * 2
        assert ask_all(ranks, "") == [expected(good)] * 2


def test_pipeline_stages_are_refused_at_once(engines: Engines, name: str) -> None:
    (first,) = engines(1)
    with ds.WeightKeeper(name) as kept:
        assert ask(first, loaded(name, "plain", publish=True, pp_size=2)) == "ready"
        done, reason = ask(first, {"update": [f"keeper:{name}"]})
        assert not done and reason.startswith("UnsupportedError: SGLang passes a request to a pipeline stage")
        assert ask(first, {"release": None}) is None
        assert readers(kept) == [1]


def test_draft_model_keeps_its_weights(engines: Engines, name: str) -> None:
    (one,) = engines(1)
    with ds.WeightKeeper(name):
        assert ask(one, loaded(name, "plain", publish=True)) == "ready"
        draft = in_place(name, load_format="dummy")
        draft[2] = {"kind": "plain", "is_draft_model": True}
        assert ask(one, draft) == "ready"
        former = ask(one)
        assert ask(one, {"update": [f"keeper:{name}"]}) == SUCCESS and ask(one) == former


def test_update_without_a_keeper_is_an_answer(engines: Engines, name: str) -> None:
    (first,) = engines(1)
    with ds.WeightKeeper(name):
        assert ask(first, loaded(name, "plain", publish=True)) == "ready"
    former = ask(first)
    done, reason = ask(first, {"update": [f"keeper:{name}"]})
    assert not done and "GoneError" in reason and "does not run" in reason
    assert ask(first) == former


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_released_weights_come_back_at_their_addresses(engines: Engines, name: str, tags: "list[str] | None") -> None:
    first, second = engines(2)
    with ds.WeightKeeper(name) as kept:
        # The publishing engine has derived tensors of its own.
        assert ask(first, loaded(name, None, publish=True)) == ask(second, loaded(name, None, publish=False)) == "ready"
        found, addresses = ask(first), [ask(one, {"facts": None})[0] for one in (first, second)]
        for _ in range(2):
            for number, one in enumerate((first, second)):
                assert ask(one, {"release": ["kv_cache"]}) is None
                assert readers(kept) == [2]
                assert ask(one, {"resume": ["kv_cache"]}) is None
                assert ask(one, {"release": tags}) is None
                assert readers(kept) == [1]
                done, reason = ask(one, {"update": [f"keeper:{name}"]})
                assert not done and "resume it before an update" in reason
                assert ask(second if one is first else first) == found
                assert ask(one, {"resume": tags}) is None
                assert ask(one) == found and ask(one, {"facts": None})[0] == addresses[number]


def test_released_weights_come_back_as_the_present_version(engines: Engines, name: str) -> None:
    first, second = engines(2)
    with ds.WeightKeeper(name) as kept:
        assert ask(first, loaded(name, "plain", publish=True)) == ask(second, loaded(name, "plain", publish=False)) == "ready"
        assert ask(second, {"release": ["weights"]}) is None
        with device_ipc.share(weights(4)) as export:
            assert ask(first, {"update": [str(export)]}) == SUCCESS
        flushes = ask(second, {"facts": None})[2]
        assert ask(second, {"resume": ["weights"]}) is None
        assert ask(second) == ask(first) == expected(weights(4))
        assert ask(second, {"facts": None})[2] == flushes + 1, "the cache is that of the former version"
        assert ask(second, {"release": ["weights"]}) is None
    del kept
    assert ask(second, {"resume": ["weights"]}).startswith("GoneError")

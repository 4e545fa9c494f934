"""Sleep of engines whose weights are in place: the keeper keeps the bytes. Workers, loaders and reloads are those of test_vllm.py."""

import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.vllm
import vllm_engines
from test_vllm import weights
from vllm_engines import Engines
from vllm_fixtures import AT_ONCE, engines_of_a_version, processes_of_a_module  # noqa: F401


@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_returned_in_sleep_and_come_back_at_their_addresses(engines: Engines, level: int) -> None:
    first, second = engines.start("first", publish=True), engines.start("second")
    digests, addresses = first.ask("digests"), second.ask("addresses")
    assert engines.readers() == 2
    for step in range(3):
        second.ask("sleep", level)
        assert second.ask("suspended") == [True] and engines.readers() == 1
        # Tensors of its own are lost at no level: no load restores them.
        assert "weights" in second.ask("allocator")[0][0]
        assert first.ask("digests") == digests
        if step == 1:
            second.ask("wake_up", ["kv_cache"])
            assert second.ask("suspended") == [True], "another tag does not wake the weights"
        second.ask("wake_up", ["weights"] if step else None)
        assert second.ask("digests") == digests and second.ask("addresses") == addresses
        assert engines.readers() == 2
    assert second.ask("allocator")[0][1] == [None, ["kv_cache"], ["weights"], ["weights"]]


def test_engine_wakes_with_the_version_that_was_published_meanwhile(engines: Engines) -> None:
    first, second = engines.start("first", publish=True), engines.start("second")
    addresses = second.ask("addresses")
    second.ask("sleep", 2)
    state = weights()
    sender = device_ipc.vllm.WeightSender(first, timeout=vllm_engines.TIMEOUT)
    for step in range(2):
        for tensor in state.values():
            tensor.fill_(step + 3)
        sender.send(state.items())
        device_ipc.vllm.follow(first)
    with pytest.raises(RuntimeError, match="sleeps"):
        device_ipc.vllm.follow(second)
    with pytest.raises(RuntimeError, match="sleeps"):
        device_ipc.vllm.WeightSender(second).send(state.items())
    second.ask("wake_up", None)
    assert second.ask("digests") == first.ask("digests") and second.ask("addresses") == addresses
    # It takes part in what comes then.
    for tensor in state.values():
        tensor.fill_(7)
    sender.send(state.items())
    device_ipc.vllm.follow(second)
    device_ipc.vllm.follow(first)
    assert second.ask("digests") == first.ask("digests")
    sender.close()


def test_ranks_that_wake_at_the_same_time_have_one_version(engines: Engines) -> None:
    first, second = engines.start("first", 2, publish=True), engines.start("second", 2)
    digests = first.ask("digests")
    slowest = 0.0
    for step in range(20):
        for engine in (first, second):
            engine.ask("sleep", 1 + step % 2)
        assert engines.readers(0) == engines.readers(1) == 0
        begin = time.monotonic()
        for engine in (first, second):
            engine.ask("wake_up", None)
        slowest = max(slowest, time.monotonic() - begin)
    assert first.ask("digests") == second.ask("digests") == digests
    # No wait has ended by its limit.
    assert slowest < 10


@pytest.mark.parametrize("dies", [False, True])
def test_all_ranks_stay_asleep_if_one_cannot_wake(engines: Engines, dies: bool) -> None:
    engine = engines.start("engine", 2, publish=True)
    digests = engine.ask("digests")
    engine.ask("sleep", 1)
    engine.ranks[1].ask("break_take", dies)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="GoneError: .*rank 1" + (", has ended.*the rank died" if dies else " has failed: ArithmeticError")):
        engine.ask("wake_up", None)
    assert time.monotonic() - begin < AT_ONCE
    if dies:
        engine.ranks.pop().kill()
        assert engine.ask("suspended") == [True]
        return
    assert engine.ask("suspended") == [True, True]
    engine.ask("wake_up", None)
    assert engine.ask("digests") == digests


def test_wake_without_a_keeper_fails_and_the_engine_stays_asleep(engines: Engines) -> None:
    engine = engines.start("engine", publish=True)
    engine.ask("sleep", 1)
    engines.keeper.close()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="GoneError: .*does not run"):
        engine.ask("wake_up", None)
    assert time.monotonic() - begin < AT_ONCE
    assert engine.ask("suspended") == [True]


def test_weights_of_another_model_do_not_wake_an_engine(engines: Engines) -> None:
    engine = engines.start("engine", publish=True)
    digests = engine.ask("digests")
    engine.ask("sleep", 1)
    engines.keeper.close()
    for model, error in (("another", "LayoutError: .*'another', and not 'model'"), ("model", "")):
        with device_ipc.vllm.WeightKeeper(engines.keeper.name):
            engines.start(model, publish=True, model=model)
            if error:
                with pytest.raises(RuntimeError, match=error):
                    engine.ask("wake_up", None)
                assert engine.ask("suspended") == [True]
            else:
                engine.ask("wake_up", None)
                assert engine.ask("digests") == digests

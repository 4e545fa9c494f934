"""Updates of weights in place of an engine with two ranks, of which one leaves: the update ends for the other at once, and changes nothing."""

import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc
import device_ipc.vllm
import vllm_engines
from test_vllm import weights
from vllm_engines import Engines
from vllm_fixtures import AT_ONCE, engines_of_a_version, processes_of_a_module  # noqa: F401


def fails_at_once(engine: vllm_engines.Engine, rank: int, method: str) -> str:
    """Calls a method of one rank, which waits for the other; returns its error."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        engine.ranks[rank].ask(method)
    assert time.monotonic() - begin < AT_ONCE, "the wait has ended by its limit"
    return str(caught.value)


@pytest.mark.parametrize("moment", ["started", "updated", "waits"])
def test_update_ends_at_once_when_a_rank_is_killed(engines: Engines, moment: str) -> None:
    engine, other = engines.start("engine", 2, publish=True), engines.start("other", 2)
    former = engine.ask("digests")
    versions = [str(export.descriptor) for export in engines.keeper.exports]
    state = weights()
    for tensor in state.values():
        tensor.fill_(9)
    alive, killed = engine.ranks
    with device_ipc.share(state) as export:
        engine.start_weight_update()
        if moment == "started":
            alive.ask("update_weights", {"weights": str(export)})
        else:
            engine.update_weights({"weights": str(export)})
        if moment == "waits":
            alive.begin("finish_weight_update")
        killed.kill()
        engine.ranks = [alive]
        if moment == "waits":
            with pytest.raises(RuntimeError, match="GoneError: .*rank 1, has ended"):
                alive.end()
        else:
            assert "GoneError" in (error := fails_at_once(engine, 0, "finish_weight_update")) and "rank 1, has ended" in error
    assert alive.ask("digests") == former[0] and other.ask("digests") == former
    assert versions == [str(export.descriptor) for export in engines.keeper.exports]
    # Another engine publishes the next version.
    sender = device_ipc.vllm.WeightSender(other, timeout=vllm_engines.TIMEOUT)
    sender.send(state.items())
    device_ipc.vllm.follow(other)
    assert other.ask("digests") != former
    sender.close()


@pytest.mark.parametrize("moment", ["break_open", "refuse"])
def test_update_ends_at_once_when_a_rank_fails(engines: Engines, moment: str) -> None:
    engine = engines.start("engine", 2, publish=True)
    former = engine.ask("digests")
    state = weights()
    sender = device_ipc.vllm.WeightSender(engine, timeout=vllm_engines.TIMEOUT)
    sender.send(state.items())
    device_ipc.vllm.follow(engine)
    former = engine.ask("digests")
    for tensor in state.values():
        tensor.fill_(3)
    # Before it has opened the trainer's memory, or in the load.
    engine.ranks[1].ask(moment, next(iter(state)))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="ArithmeticError"):
        sender.send(state.items())
    assert time.monotonic() - begin < AT_ONCE
    device_ipc.vllm.follow(engine)
    assert engine.ask("digests") == former
    sender.send(state.items())
    device_ipc.vllm.follow(engine)
    now = engine.ask("digests")
    assert now != former and now[0] == now[1]
    sender.close()


@pytest.mark.parametrize("dies", [False, True])
def test_all_ranks_follow_or_none(engines: Engines, dies: bool) -> None:
    engine, other = engines.start("engine", 2, publish=True), engines.start("other", 2)
    former = engine.ask("digests")
    state = weights()
    for tensor in state.values():
        tensor.fill_(9)
    sender = device_ipc.vllm.WeightSender(engine, timeout=vllm_engines.TIMEOUT)
    sender.send(state.items())
    broken = other.ranks[1]
    broken.ask("break_take", dies)
    with pytest.raises(RuntimeError, match="the rank died" if dies else "ArithmeticError"):
        device_ipc.vllm.follow(other)
    if dies:
        other.ranks.remove(broken)
        assert other.ask("digests") == former[:1]
    else:
        assert other.ask("digests") == former
        device_ipc.vllm.follow(other)
        assert other.ask("digests") != former
    # The former version is there as long as an engine has it, and no longer.
    assert all(part.former is not None for part in engines.keeper._parts.values())
    device_ipc.vllm.follow(engine)
    for rank in other.ranks if dies else []:
        rank.kill()
    deadline = time.monotonic() + AT_ONCE
    while any(part.former is not None for part in engines.keeper._parts.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    sender.close()

"""The keeper of processed weights: one engine of each rank fills its memory, and all read it. The engines are stand-ins that speak its messages."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import Start, used, wait_used

import device_ipc
from device_ipc.vllm import WeightKeeper

ENGINE = """
import json, os, sys
import numpy as np
import device_ipc
from device_ipc._weight_keeper import channel

name, kind, *arguments = sys.argv[1:]
peer = device_ipc.connect(channel(name, publishes=kind == "publishes"), timeout=60)
print("connected", flush=True)

def ask(request):
    try:
        peer.send(json.dumps(request).encode(), timeout=60)
    except device_ipc.GoneError:
        pass  # What the keeper has said before is received first.
    message = peer.receive(60)
    return json.loads(message.data), message

for line in sys.stdin:
    command, *words = line.split()
    if command[0] == "{":
        answer, message = ask(json.loads(line))
        if "memory" in answer:
            memory = message.open(access="rw")
    elif command == "rank":
        answer, _ = ask({"rank": int(words[0])})
    elif command == "layout":
        uuid = device_ipc.devices()[int(words[0])].uuid if words[0].isdigit() else words[0]
        answer, message = ask({"manifest": "text", "tensors": [["a", "float32", [3]], ["b", "uint8", [5]]], "device": uuid})
        if "memory" in answer:
            memory = message.open(access="rw")
            answer["homes"] = memory.devices
    elif command == "fill":
        for tensor in memory.values():
            np.from_dlpack(tensor)[:] = int(words[0])
        del tensor
        memory.close()
        answer, _ = ask({"filled": True})
    elif command == "read":
        with device_ipc.open(words[0]) as weights:
            answer = [weights.read_only, *(np.from_dlpack(one).tolist() for one in weights.values())]
    else:
        answer, _ = ask(json.loads(line))
    print(json.dumps(answer), flush=True)
"""


class Engine:
    def __init__(self, start: Start, name: str, kind: str) -> None:
        self.process = start(ENGINE, name, kind)
        assert self.process.stdout and self.process.stdout.readline() == "connected\n"

    def begin(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str) -> Any:
        self.begin(command)
        return self.end()


@pytest.fixture
def name() -> str:
    return f"weights-{os.getpid()}"


def test_first_engine_fills_the_memory_that_all_read(start: Start, name: str) -> None:
    before = used()
    with WeightKeeper(name) as keeper:
        assert keeper.name == name and keeper.exports == []
        reader, first, second = Engine(start, name, "reads"), Engine(start, name, "publishes"), Engine(start, name, "publishes")
        reader.begin("rank 0")
        assert first.ask("rank 0") == {"publish": True}
        second.begin("rank 0")
        assert first.ask("layout 1") == {"memory": True, "homes": ["mock:1"]}
        kept = {"keeper": name, "manifest": "text"}
        assert first.ask("fill 7") == kept
        assert reader.end() == second.end() == kept
        for engine in (reader, first, second):
            assert engine.ask(f"read keeper:{name}") == [True, [7.0] * 3, [7] * 5]
        assert Engine(start, name, "reads").ask("rank 0") == kept
        assert [export.names for export in keeper.exports] == [["a", "b"]]
    wait_used(before)


def test_each_rank_has_its_weights(start: Start, name: str) -> None:
    with WeightKeeper(name) as keeper:
        for rank in (1, 0):
            engine = Engine(start, name, "publishes")
            assert engine.ask(f"rank {rank}") == {"publish": True}
            engine.ask(f"layout {rank}")
            assert engine.ask(f"fill {rank}")["keeper"] == (f"{name}.1" if rank else name)
        assert engine.ask(f"read keeper:{name}.1") == [True, [1.0] * 3, [1] * 5]
        assert engine.ask(f"read keeper:{name}") == [True, [0.0] * 3, [0] * 5]
        assert len(keeper.exports) == 2


@pytest.mark.parametrize("steps", [["rank 0"], ["rank 0", "layout 0"]])
def test_next_engine_publishes_when_one_is_killed(start: Start, name: str, steps: "list[str]") -> None:
    before = used()
    with WeightKeeper(name):
        first, second, reader = Engine(start, name, "publishes"), Engine(start, name, "publishes"), Engine(start, name, "reads")
        for step in steps:
            first.ask(step)
        reader.begin("rank 0")
        second.begin("rank 0")
        first.process.kill()
        assert second.end() == {"publish": True}
        second.ask("layout 0")
        second.ask("fill 3")
        assert reader.end()["keeper"] == name
    wait_used(before)


def test_requests_out_of_turn_are_refused(start: Start, name: str) -> None:
    with WeightKeeper(name):
        first = Engine(start, name, "publishes")
        assert first.ask("rank 0") == {"publish": True}
        refused = [("layout 0", "not the one that publishes"), ('{"filled":true}', "not the one that publishes"), ('["x"]', ""), ('{"rank":"x"}', "")]
        for request, message in refused:
            assert message in Engine(start, name, "reads").ask(request)["error"]
        assert "no device GPU-0" in first.ask("layout GPU-0")["error"]
        # The next one publishes.
        second = Engine(start, name, "publishes")
        assert second.ask("rank 0") == {"publish": True}
        assert "no known key" in second.ask('{"unknown":1}')["error"]
        assert Engine(start, name, "publishes").ask("rank 0") == {"publish": True}


def joined(start: Start, name: str, rank: int, ranks: int, group: str = "one", kind: str = "publishes") -> Engine:
    engine = Engine(start, name, kind)
    assert engine.ask(json.dumps({"rank": rank, "ranks": ranks, "group": group})) == {"joined": True}
    return engine


def update(start: Start, name: str, rank: int, ranks: int, group: str = "one") -> "tuple[Engine, Any]":
    engine = joined(start, name, rank, ranks, group)
    return engine, engine.ask('{"update":true}')


def publish(start: Start, name: str, rank: int, value: int) -> Engine:
    engine = Engine(start, name, "publishes")
    for command in (f"rank {rank}", "layout 0", f"fill {value}"):
        engine.ask(command)
    return engine


def test_new_version_takes_the_place_of_all_ranks_at_once(start: Start, name: str) -> None:
    with WeightKeeper(name):
        for rank in (0, 1):
            reader = publish(start, name, rank, rank)
        (first, answer), (second, _) = update(start, name, 0, 2), update(start, name, 1, 2)
        assert answer["memory"] is True
        first.begin("fill 5")
        assert reader.ask(f"read keeper:{name}")[1] == [0.0] * 3
        assert second.ask("fill 6")["keeper"] == f"{name}.1" and first.end()["keeper"] == name
        assert reader.ask(f"read keeper:{name}")[1] == [5.0] * 3
        assert reader.ask(f"read keeper:{name}.1")[1] == [6.0] * 3


@pytest.mark.parametrize("moment", ["joined", "has memory", "others have filled theirs"])
def test_update_ends_with_any_of_its_engines(start: Start, name: str, moment: str) -> None:
    before = used()
    with WeightKeeper(name):
        for rank in (0, 1):
            reader = publish(start, name, rank, rank)
        first = update(start, name, 0, 2)[0]
        second = joined(start, name, 1, 2) if moment == "joined" else update(start, name, 1, 2)[0]
        if moment == "others have filled theirs":
            first.begin("fill 5")
        second.process.kill()
        second.process.wait(60)
        if moment != "others have filled theirs":
            first.begin("fill 5")
        assert "rank 1, has ended" in first.end()["gone"]
        assert reader.ask(f"read keeper:{name}")[1] == [0.0] * 3
        # The next one succeeds.
        for rank in (0, 1):
            first, second = second, update(start, name, rank, 2)[0]
        first.begin("fill 7")
        second.ask("fill 7")
        assert reader.ask(f"read keeper:{name}.1")[1] == [7.0] * 3
    wait_used(before)


def test_updates_out_of_turn_are_refused(start: Start, name: str) -> None:
    with WeightKeeper(name):
        assert "no weights of this rank" in update(start, name, 0, 1)[1]["error"]
        publish(start, name, 0, 1)
        assert "only read" in joined(start, name, 0, 1, kind="reads").ask('{"update":true}')["error"]
        publish(start, name, 1, 1)
        engine, _ = update(start, name, 0, 1)
        assert "updates the weights" in update(start, name, 0, 1, "another")[1]["error"]
        assert "updates the weights" in update(start, name, 1, 2, "a third")[1]["error"]
        assert engine.ask('{"filled":true}')["keeper"] == name


def test_all_ranks_take_the_same_version(start: Start, name: str) -> None:
    with WeightKeeper(name) as keeper:
        for rank in (0, 1):
            reader = publish(start, name, rank, rank)
        first, second = (joined(start, name, rank, 2, kind="reads") for rank in (0, 1))
        first.begin('{"take":true}')
        writers = [update(start, name, rank, 2, "writers")[0] for rank in (0, 1)]
        writers[0].begin("fill 5")
        writers[1].ask("fill 5")
        assert writers[0].end()["keeper"] == name
        second.begin('{"take":true}')
        answers = [engine.end() for engine in (first, second)]
        assert [one["manifest"] for one in answers] == ["text"] * 2
        taken = [one["descriptor"] for one in answers]
        assert taken == [str(export.descriptor) for export in keeper.exports]
        first.begin('{"taken":true}')
        # Another version before all have taken this one, which they still can.
        writers = [update(start, name, rank, 2, "writers")[0] for rank in (0, 1)]
        writers[0].begin("fill 6")
        writers[1].ask("fill 6")
        assert reader.ask(f"read {taken[1]}")[1] == [5.0] * 3
        assert second.ask('{"taken":true}') == first.end() == {"done": True}


def test_group_ends_for_all_when_one_of_its_ranks_leaves(start: Start, name: str) -> None:
    with WeightKeeper(name):
        assert "no weights" in joined(start, name, 0, 1).ask('{"take":true}')["gone"]
        publish(start, name, 0, 1)
        first, second = (joined(start, name, rank, 2, "two") for rank in (0, 1))
        first.begin('{"take":true}')
        # It begins again before the end of its former connection arrives.
        third = joined(start, name, 1, 2, "two")
        assert "rank 1 has begun again" in first.end()["gone"]
        assert "rank 1 has begun again" in second.ask('{"take":true}')["gone"]
        first = joined(start, name, 0, 2, "two")
        first.begin('{"update":true}')
        assert first.end()["memory"] is True
        first.begin('{"filled":true}')
        third.begin('{"take":true}')
        assert "do not do the same" in first.end()["gone"] and "do not do the same" in third.end()["gone"]
        refused = Engine(start, name, "reads").ask('{"rank":2,"ranks":2,"group":"two"}')
        assert "none of 2" in refused["error"]


def test_reason_of_a_rank_that_fails_reaches_the_others(start: Start, name: str) -> None:
    with WeightKeeper(name):
        assert "not the one that publishes" in Engine(start, name, "reads").ask('{"failed":"alone"}')["error"]
        for rank in (0, 1):
            publish(start, name, rank, rank)
        first = joined(start, name, 0, 2)
        first.begin('{"ready":true}')
        second = joined(start, name, 1, 2)
        assert second.ask('{"ready":true}') == first.end() == {"done": True}
        second.begin(json.dumps({"failed": "x" * 5000}))
        first.begin('{"take":true}')
        reason = first.end()["gone"]
        assert reason.startswith("rank 1 has failed: xxx") and len(reason) < 2000
        # Its connection has ended.
        assert second.process.wait(60) == 1


def test_weights_stay_readable_after_the_keeper_is_killed(start: Start, name: str) -> None:
    keeper = start(f"from device_ipc.vllm import WeightKeeper; k = WeightKeeper({name!r}); print(1, flush=True); sys.stdin.readline()")
    assert keeper.stdout
    keeper.stdout.readline()
    engine, waiting = Engine(start, name, "publishes"), Engine(start, name, "reads")
    engine.ask("rank 0")
    engine.ask("layout 0")
    engine.ask("fill 9")
    waiting.begin("rank 1")
    with device_ipc.open(f"keeper:{name}") as weights:
        keeper.kill()
        keeper.wait(60)
        # The channel has ended.
        assert waiting.process.wait(60) == 1
        assert np.from_dlpack(weights["a"]).tolist() == [9.0] * 3
    with WeightKeeper(name):
        assert Engine(start, name, "publishes").ask("rank 0") == {"publish": True}


def test_program_keeps_what_an_engine_publishes(start: Start, name: str) -> None:
    arguments = [sys.executable, "-m", "device_ipc", "keep", "--empty", "--name", name]
    keeper = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout and f"keeper:{name}" in keeper.stdout.readline()
        engine = Engine(start, name, "publishes")
        for step in ("rank 0", "layout 0"):
            engine.ask(step)
        assert engine.ask("fill 1")["keeper"] == name
        keeper.send_signal(signal.SIGHUP)
        assert engine.ask(f"read keeper:{name}")[0]
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 0
    finally:
        keeper.kill()
        keeper.communicate(timeout=60)


@pytest.mark.parametrize("arguments", [[], ["--empty", "x.safetensors"], ["--empty", "--writable"], ["--empty", "--device", "mock:0"]])
def test_program_refuses_contradicting_arguments(arguments: "list[str]", name: str) -> None:
    program = [sys.executable, "-m", "device_ipc", "keep", "--name", name, *arguments]
    assert subprocess.run(program, capture_output=True, text=True, timeout=60).returncode == 1

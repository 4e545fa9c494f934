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

def ask(request):
    peer.send(json.dumps(request).encode(), timeout=60)
    message = peer.receive(60)
    return json.loads(message.data), message

for line in sys.stdin:
    command, *words = line.split()
    if command == "rank":
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

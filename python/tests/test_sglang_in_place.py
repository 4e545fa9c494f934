"""Engines of SGLang whose weights are those of a keeper, on the mock: its hooks, configuration and loaders of the wheel, and a small model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.sglang as ds
import device_ipc.torch as dt
import frameworks
from sglang_worker import digest
from test_sglang import CARRIED, VERSION, answer

PROGRAM = Path(__file__).parent / "sglang_engine.py"
Process = subprocess.Popen[str]
Start = Callable[[], Process]


@pytest.fixture(scope="module", params=[CARRIED, VERSION])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts the process of an engine."""
    frameworks.wheel("sglang", request.param)
    started: "list[Process]" = []

    def start() -> Process:
        command = [sys.executable, "-u", str(PROGRAM), request.param]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate(timeout=30)


@pytest.fixture(scope="module")
def engine(start: Start) -> Process:
    """A process that loads one model after the other: importing torch takes seconds."""
    return start()


def send(one: Process, request: Any) -> None:
    assert one.stdin is not None
    one.stdin.write(json.dumps(request) + "\n")
    one.stdin.flush()


def ask(one: Process, request: Any = "") -> Any:
    send(one, request)
    return answer(one)


def in_place(name: str, **extra: Any) -> "list[Any]":
    return ["device_ipc", {"source": f"keeper:{name}", "in_place": True, "timeout": 120, **extra}, {}]


def test_engines_share_one_copy_which_outlives_the_first(start: Start, engine: Process) -> None:
    name = f"sglang-{os.getpid()}"
    with ds.WeightKeeper(name) as keeper:
        first, second = start(), engine
        send(first, in_place(name, publish=True, load_format="dummy"))
        assert ask(second, in_place(name)) == answer(first) == "ready"
        tensors, _ = found = ask(first)
        # The tied parameter has two names.
        assert tensors["embed.weight"] == tensors["head.weight"] and {"derived", "norm", "table", "fused.weight"} < set(tensors)
        assert ask(second) == found
        assert [len(export.holders()) for export in keeper.exports] == [2]
        first.kill()
        first.wait(timeout=30)
        assert ask(second) == found, "after the engine that published was killed"
        third = start()
        assert ask(third, in_place(name)) == "ready" and ask(third) == found, "an engine that starts later"
        export = device_ipc.share({"norm": device_ipc.empty((64,), "float32", "mock:0")})
        for done, reason in ask(third, {"update_otherwise": [str(export)]}):
            assert not done and reason.startswith("UnsupportedError: the weights of this engine are the memory of a keeper")
            assert f"named_tensors('keeper:{name}')" in reason
        assert ask(third) == found, "after updates were refused"
        send(third, {"write": None})
        assert third.stdout is not None and third.stdout.readline() == "", "a write ends the engine"
        assert ask(second) == found, "after another engine has written"


def test_engine_with_another_manifest_is_refused_with_the_difference(engine: Process) -> None:
    name = f"sglang-{os.getpid()}-refused"
    with ds.WeightKeeper(name):
        assert ask(engine, in_place(name, publish=True, load_format="dummy")) == "ready"
        found = ask(engine)
        refused = {
            "another model than this engine: 'llama', and not 'other'": {"model_path": "other"},
            "another moe_runner_backend than this engine: 'auto', and not 'triton'": {"moe_runner_backend": "triton"},
            "another tensor_parallel_size than this engine: 1, and not 2": {"tp_size": 2},
            "quantised (fp8) are not supported in place": {"quantization": "fp8"},
            "--enable-eplb": {"enable_eplb": True},
            "cannot be offloaded": {"cpu_offload_gb": 1},
        }
        for text, change in refused.items():
            assert text in ask(engine, [*in_place(name)[:2], change]), change
        assert ask(engine) == found
        # A draft model has weights of its own, from files.
        assert ask(engine, [*in_place(name, load_format="dummy")[:2], {"is_draft_model": True}]) == "ready"
        assert ask(engine) != found


def test_weights_of_an_export_are_copied_at_the_start(engine: Process) -> None:
    torch.manual_seed(0)
    shapes = {"gate": (64, 64), "up": (64, 64), "embed": (64, 64), "norm": (64,)}
    state = {name: dt.empty(list(shape), torch.bfloat16, "mock:0").copy_(torch.rand(shape)) for name, shape in shapes.items()}
    with device_ipc.share(state) as export:
        assert ask(engine, ["device_ipc", {"source": str(export)}, {}]) == "ready"
    tensors, _ = ask(engine)
    fused = torch.cat([state["gate"], state["up"]]).t()
    expected = {"fused.weight": fused, "embed.weight": state["embed"].t(), "derived": state["gate"].t(), "norm": state["norm"]}
    assert {name: tensors[name] for name in expected} == {name: digest(tensor) for name, tensor in expected.items()}
    # Models of this process were in place, whose updates are refused. This one's update reaches its load, which cannot load processed weights.
    assert ask(engine, {"update": [str(export)]}).startswith("StaleError")


@pytest.mark.parametrize(
    ("load_format", "extra", "changes", "message"),
    [
        ("device_ipc", {}, {}, "ValueError: --load-format device_ipc needs"),
        ("device_ipc", {"source": "keeper:x", "further": 1}, {}, "ValueError: model_loader_extra_config has unknown keys"),
        ("device_ipc", {"source": "keeper:x", "publish": True}, {}, 'which needs "in_place": true'),
        ("unknown", {}, {}, "ValueError: 'unknown' is not a valid LoadFormat"),
        ("dummy", {}, {}, "ready"),
        # As SGLang's update_weights_from_disk, which passes the load format of the engine on.
        ("device_ipc", {}, {"load_rank": None}, "DefaultModelLoader of LoadFormat.AUTO"),
    ],
)
def test_configurations_are_checked(engine: Process, load_format: str, extra: Any, changes: Any, message: str) -> None:
    assert message in ask(engine, [load_format, extra, changes])


def test_package_names_the_plugin_of_sglang() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\ndevice_ipc = "device_ipc.sglang:register"' in text

"""The manifest of processed weights: equal ones pass, and the first difference is named."""

import dataclasses
import json
import types
from typing import Any

import pytest

import device_ipc
from device_ipc.vllm._manifest import LIMIT, Manifest


def config(rank: int = 1, **changes: Any) -> Any:
    """Returns the parts of vLLM's configuration that are read."""
    model: "dict[str, Any]" = {"model": "org/llama", "revision": "abc", "dtype": "torch.bfloat16", "quantization": None}
    parallel: "dict[str, Any]" = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "enable_expert_parallel": False, "rank": rank}
    model.update({name: value for name, value in changes.items() if name in model})
    parallel.update({name: value for name, value in changes.items() if name in parallel})
    return types.SimpleNamespace(model_config=types.SimpleNamespace(**model), parallel_config=types.SimpleNamespace(**parallel))


def manifest(**changes: Any) -> Manifest:
    further = changes.pop("further", {"layers.0.attn._q_scale_float": 1.0})
    version, architecture = changes.pop("vllm", "0.26.0"), changes.pop("architecture", "sm_90")
    return Manifest.of(config(**changes), version, architecture, further)


def test_equal_manifests_pass_as_text_too() -> None:
    one = manifest()
    assert Manifest.parse(str(one)) == one
    one.check(Manifest.parse(str(manifest())))
    # Ranks of another replica have the same weights.
    one.check(manifest(rank=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "org/other"}, 'another model than this engine: "org/other", and not "org/llama"'),
        ({"revision": None}, 'another revision than this engine: null, and not "abc"'),
        ({"dtype": "torch.float16"}, "another dtype"),
        ({"quantization": "fp8"}, 'another quantization than this engine: "fp8", and not null'),
        ({"tensor_parallel_size": 4}, "another tensor_parallel_size than this engine: 4, and not 2"),
        ({"pipeline_parallel_size": 2}, "another pipeline_parallel_size"),
        ({"enable_expert_parallel": True}, "another expert_parallel"),
        ({"rank": 0}, "another rank than this engine: 0, and not 1"),
        ({"vllm": "0.26.1"}, "another vllm"),
        ({"architecture": "sm_100"}, "another architecture"),
        ({"further": {"layers.0.attn._q_scale_float": 2.0}}, r"another further\['layers.0.attn._q_scale_float'\] than.*: 2.0, and not 1.0"),
        ({"further": {"layers.0.attn._q_scale_float": 1}}, "1, and not 1.0"),
        ({"further": {}}, "absent, and not 1.0"),
        ({"further": {"layers.0.attn._q_scale_float": 1.0, "more": True}}, r"further\['more'\] than this engine: true, and not absent"),
        ({"model": "other", "dtype": "other"}, "another model"),
    ],
)
def test_first_difference_is_named(changes: "dict[str, Any]", message: str) -> None:
    with pytest.raises(device_ipc.LayoutError, match=message):
        manifest().check(manifest(**changes))


def test_every_field_is_compared() -> None:
    one = manifest()
    for field in dataclasses.fields(Manifest):
        change: "dict[str, Any]" = {field.name: {"x": 1} if field.name == "further" else "other"}
        other = dataclasses.replace(one, **change)
        with pytest.raises(device_ipc.LayoutError, match="further" if field.name == "further" else f"another {field.name} "):
            one.check(other)


def test_text_that_is_no_manifest_is_refused() -> None:
    values = dataclasses.asdict(manifest())
    wrong = ["", "[]", "1", "{}", "[" * 100000, " " * (LIMIT + 1), json.dumps({**values, "unknown": 1})]
    ranks: "list[Any]" = [True, "0", 1.0, None]
    wrong += [json.dumps({**values, "rank": value}) for value in ranks]
    wrong += [json.dumps({**values, "model": None}), json.dumps({**values, "expert_parallel": 1})]
    furthers: "list[Any]" = [[], None, {"x": []}, {"x": {}}, {"x": float("nan")}]
    wrong += [json.dumps({**values, "further": value}) for value in furthers]
    wrong.append(json.dumps({**values, "further": {"x": 1}}).replace('"x": 1', '"x": 1e999'))
    for text in wrong:
        with pytest.raises(device_ipc.LayoutError, match="is not a manifest"):
            Manifest.parse(text)
    assert Manifest.parse(json.dumps({name: value for name, value in values.items() if name != "further"})).further == {}

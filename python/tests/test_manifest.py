"""The manifest of processed weights: equal ones pass, and the first difference is named."""

import dataclasses
import types
from typing import Any

import pytest

import device_ipc
from device_ipc.vllm._manifest import VllmManifest


def manifest(rank: int = 1, **changes: Any) -> VllmManifest:
    """Returns the manifest of the parts of vLLM's configuration that are read, with changes."""
    values: "dict[str, Any]" = {
        "model": "org/llama", "revision": "abc", "dtype": "torch.bfloat16", "quantization": None, "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1, "enable_expert_parallel": False, "rank": rank, "vllm": "0.26.0", "device": "A",
        "hf": {"hidden_size": 64}, **changes,
    }  # fmt: skip
    values["hf_config"] = types.SimpleNamespace(to_dict=lambda: values["hf"])
    config = types.SimpleNamespace(**values)
    return VllmManifest.of(config, config, config.vllm, config.device)


def test_equal_manifests_pass_as_text_too() -> None:
    one = manifest()
    assert VllmManifest.parse(dataclasses.asdict(one)) == one
    one.check(VllmManifest.parse(dataclasses.asdict(manifest())))
    # Where the files are, and by which release of transformers they were written, says nothing of the weights.
    one.check(manifest(hf={"hidden_size": 64, "_name_or_path": "/x", "transformers_version": "5.0"}))
    # Ranks of another replica have the same weights.
    one.check(manifest(rank=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "org/other"}, 'another model than this engine: \'org/other\', and not \'org/llama\''),
        ({"revision": None}, 'another revision than this engine: None, and not \'abc\''),
        ({"dtype": "torch.float16"}, "another dtype"),
        ({"quantization": "fp8"}, 'another quantization than this engine: \'fp8\', and not None'),
        ({"tensor_parallel_size": 4}, "another tensor_parallel_size than this engine: 4, and not 2"),
        ({"pipeline_parallel_size": 2}, "another pipeline_parallel_size"),
        ({"enable_expert_parallel": True}, "another expert_parallel"),
        ({"rank": 0}, "another rank than this engine: 0, and not 1"),
        ({"vllm": "0.26.1"}, "another vllm"),
        ({"device": "B"}, "another device"),
        ({"hf": {"hidden_size": 128}}, "another config"),
        ({"model": "other", "dtype": "other"}, "another model"),
    ],
)
def test_first_difference_is_named(changes: "dict[str, Any]", message: str) -> None:
    with pytest.raises(device_ipc.LayoutError, match=message):
        manifest().check(manifest(**changes))


def test_every_field_is_compared() -> None:
    one = manifest()
    for field in dataclasses.fields(VllmManifest):
        change: "dict[str, Any]" = {field.name: "other"}
        with pytest.raises(device_ipc.LayoutError, match=f"another {field.name} "):
            one.check(dataclasses.replace(one, **change))


@pytest.mark.parametrize(
    "change", [{"unknown": 1}, {"rank": True}, {"rank": "0"}, {"rank": 1.0}, {"rank": None}, {"model": None}, {"expert_parallel": 1}]
)
def test_values_that_are_no_manifest_are_refused(change: "dict[str, Any]") -> None:
    with pytest.raises(device_ipc.LayoutError, match="not a manifest"):
        VllmManifest.parse({**dataclasses.asdict(manifest()), **change})


@pytest.mark.parametrize("values", ["", [], 1, {}, None])
def test_other_values_are_no_manifest(values: Any) -> None:
    with pytest.raises(device_ipc.LayoutError, match="not a manifest"):
        VllmManifest.parse(values)

"""device_ipc.transformers on the mock: modules of torch, and models of transformers with random weights where that is installed."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

import device_ipc.torch as dt
import device_ipc.transformers as dtr
from conftest import Start, unique
from test_share import finish, line, tell


class Module(torch.nn.Module):  # type: ignore[misc]
    """A module with a tied weight, a persistent buffer, another one, and two element types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.cast = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(8, dtype=torch.float32) / 8, persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, tokens: Any) -> Any:
        hidden = self.norm(self.embed(tokens)) + self.steps
        return self.head(self.cast(hidden.to(torch.bfloat16)).to(torch.float32))


def shared(model: Any, *without: str, read_only: bool = True) -> "dict[str, Any]":
    """Returns the state of a model in memory of the mock, which importers can be restricted to read."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name not in without:
            memory = device_ipc.empty((max(tensor.nbytes, 1),), "uint8", "mock:0", read_only=read_only)
            view = torch.from_dlpack(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            state[name] = view.copy_(tensor)
    return state


exports: "list[device_ipc.Export]" = []


def share(state: "dict[str, Any]", access: Any = "rw") -> str:
    """Shares tensors until the end of the test."""
    exports.append(device_ipc.share(state, access=access))
    return str(exports[-1])


@pytest.fixture(autouse=True)
def drop_exports() -> Iterator[None]:
    yield
    exports.clear()


def check(model: Any, state: Any, original: Any, *inputs: Any) -> None:
    """Checks that a model has the tensors of a state as they are, and computes what the original does."""
    found = model.state_dict()
    assert set(state) <= set(found)
    for name, tensor in state.items():
        assert found[name].data_ptr() == tensor.data_ptr(), name
        assert found[name].dtype is tensor.dtype, name
    assert not model.training and not any(one.requires_grad for one in model.parameters())
    with torch.no_grad():
        expected, result = original.eval()(*inputs), model(*inputs)
    assert torch.equal(getattr(result, "logits", result), getattr(expected, "logits", expected))


def test_module_has_the_shared_tensors_and_its_other_buffers() -> None:
    torch.manual_seed(0)
    original = Module()
    original.norm.running_mean.fill_(3)
    for without in [(), ("head.weight",), ("embed.weight",)]:
        export = device_ipc.share(shared(original, *without), access="r")
        # Read-only: a write by the loader would end this process.
        opened = dt.open(str(export), allow_read_only=True)
        model = dtr.load(opened, Module)
        check(model, opened, original, torch.arange(16))
        assert torch.equal(model.steps, original.steps) and model.nothing is None
        if without:
            assert model.head.weight is model.embed.weight
        del model, opened
        device_ipc.close_unused(30)
        export.close(timeout=30)


def test_tied_tensors_of_one_memory_stay_one_parameter() -> None:
    state = shared(Module())
    state["head.weight"] = state["embed.weight"]
    model = dtr.load(share(state, "r"), Module)
    assert model.head.weight is model.embed.weight


def test_parameters_are_not_allocated_and_other_threads_are_left_alone() -> None:
    import threading

    seen: "list[Any]" = []

    def build() -> Any:
        other = threading.Thread(target=lambda: seen.append(torch.nn.Linear(2, 2).weight.device.type))
        other.start()
        other.join()
        module = Module()
        seen.append({one.device.type for one in module.parameters()})
        return module

    register = torch.nn.Module.register_parameter
    dtr.load(share(shared(Module())), build)
    assert seen == ["cpu", {"meta"}]
    assert torch.nn.Module.register_parameter is register
    with pytest.raises(ZeroDivisionError):
        dtr.load({}, lambda: 1 / 0)
    assert torch.nn.Module.register_parameter is register


def test_missing_and_unknown_names_are_stated() -> None:
    model = Module()
    with pytest.raises(KeyError, match="cast.weight of Module not found"):
        dtr.load(share(shared(model, "cast.weight")), Module)
    with pytest.raises(KeyError, match="norm.running_mean of Module not found"):
        dtr.load(share(shared(model, "norm.running_mean")), Module)
    state = shared(model)
    state["else"] = state["cast.weight"]
    with pytest.warns(UserWarning, match="does not use else of the shared tensors"):
        dtr.load(share(state), Module)
    state = shared(model)
    state["cast.weight"] = state["cast.weight"][:4]
    with pytest.raises(RuntimeError, match="size mismatch for cast.weight"):
        dtr.load(share(state), Module)


def test_model_keeps_the_memory_of_another_process_until_it_is_dropped(start: Start) -> None:
    state = shared(Module())
    export = device_ipc.share(state, access="r")
    with device_ipc.keep(unique("transformers-test"), export):
        other = start(
            """
            import gc, os
            sys.path.insert(0, sys.argv[1])
            import torch, test_transformers, device_ipc.transformers as dtr
            model = dtr.load(f"keeper:{unique('transformers-test')}", test_transformers.Module)
            print(float(model(torch.arange(16)).sum()), flush=True)
            sys.stdin.readline()
            del model
            gc.collect()
            d.close_unused(30)
            print("dropped", flush=True)
            sys.stdin.readline()
            """,
            __file__.rpartition("/")[0],
        )
        expected = dtr.load(f"keeper:{unique('transformers-test')}", Module)(torch.arange(16)).sum().item()
        assert float(line(other)) == expected
        device_ipc.close_unused(30)
        assert other.pid in {holder.pid for holder in export.holders()}
        with pytest.raises(device_ipc.StillHeldError):
            export.wait_released(timeout=0.1)
        tell(other, "drop")
        assert line(other) == "dropped"
        export.wait_released(timeout=30)
        tell(other, "end")
        finish(other)


def test_killed_process_releases_its_model_and_models_outlive_their_exporter(start: Start) -> None:
    exporter = start(
        """
        sys.path.insert(0, sys.argv[1])
        import torch, test_transformers
        torch.manual_seed(5)
        export = d.share(test_transformers.shared(test_transformers.Module()), access="r")
        print(export, flush=True)
        sys.stdin.readline()
        """,
        __file__.rpartition("/")[0],
    )
    text = line(exporter)
    torch.manual_seed(5)
    original = Module()
    model = dtr.load(text, Module)
    exporter.kill()
    exporter.wait(timeout=30)
    check(model, {}, original, torch.arange(16))
    with pytest.raises(device_ipc.GoneError):
        dtr.load(text, Module, access="r", timeout=10)


CONFIGURATIONS = {
    "LlamaConfig": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen2Config": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Gemma2Config": {"num_key_value_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_of_transformers_computes_as_the_original(name: str, dtype: str) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="transformers cannot be imported", exc_type=ImportError)
    config = getattr(transformers, name)(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, **CONFIGURATIONS[name],
    )  # fmt: skip
    config.dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    original = transformers.AutoModelForCausalLM.from_config(config)
    tied = original.lm_head.weight is original.get_input_embeddings().weight
    # The files of a tied model have one of the names.
    state = shared(original, *(["lm_head.weight"] if tied else []))
    config.dtype = torch.float32
    for model_class in (None, type(original)):
        opened = dt.open(share(state, "r"), allow_read_only=True)
        model = dtr.from_pretrained(opened, config, model_class)
        check(model, opened, original, torch.arange(8)[None])
        assert type(model) is type(original) and model.dtype is getattr(torch, dtype)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        tokens = model.generate(torch.arange(3, 8)[None], max_new_tokens=4, do_sample=False)
        assert torch.equal(tokens, original.generate(torch.arange(3, 8)[None], max_new_tokens=4, do_sample=False))
    assert config.dtype is torch.float32 and torch.get_default_dtype() is torch.float32


def test_import_loads_neither_torch_nor_transformers() -> None:
    program = "import sys, device_ipc.transformers; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

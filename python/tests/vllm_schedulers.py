"""A program for test_vllm_kv.py: the schedulers of a real vLLM with its connector, without a model. The workers are this program's.

    python vllm_schedulers.py REQUESTS

First with one group of caches, then with a second one of layers with a window, then beside a connector that stands in for NIXL's.

Each block that the prefill "computes" has a number made of its tokens, by which the decode's blocks are checked.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", DEVICE_IPC_BACKEND="mock", DEVICE_IPC_MOCK="devices=1;like=cuda")

import torch as _torch
from vllm import config as vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import device_ipc

# Its type stubs do not export all functions.
torch: Any = _torch

BLOCK_TOKENS, SECONDS = 16, 60
LENGTHS = [17, 40, 64, 100, 350, 700]
"""Of prompts: parts of a block, whole blocks, and more than the tokens of a step (512)."""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 10000, "torch_dtype": "float16",
}  # fmt: skip


def number_of(tokens: "list[int]") -> float:
    return float(sum(tokens) % 1000)


class Network(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """The connector that is left what ours passes on. It has the keys of NIXL's, and transfers nothing."""

    @dataclass
    class Metadata(base.KVConnectorMetadata):  # type: ignore[misc]
        loads: "list[str]"
        sent: "list[str]"

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.next = self.Metadata([], [])
        self.loaded: "list[str]" = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> "tuple[int, bool]":
        count = request.num_prompt_tokens - computed if (request.kv_transfer_params or {}).get("do_remote_prefill") else 0
        return max(count, 0), count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            request.kv_transfer_params["do_remote_prefill"] = False
            if external > 0:
                self.loaded.append(request.request_id)
                self.next.loads.append(request.request_id)

    def request_finished_all_groups(self, request: Any, blocks: Any) -> "tuple[bool, dict[str, Any] | None]":
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self.next.sent.append(request.request_id)
        return True, {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": blocks, "remote_host": "there"}

    def build_connector_meta(self, _: Any) -> Any:
        metadata, self.next = self.next, self.Metadata([], [])
        return metadata

    def start_load_kv(self, _: Any, **_more: Any) -> None: ...
    def wait_for_layer_load(self, _: str) -> None: ...
    def save_kv_layer(self, *_: Any, **_more: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_finished(self, _: Any) -> "tuple[set[str], set[str]]":
        metadata = self._get_connector_metadata()
        return set(metadata.sent), set(metadata.loads)


class Engine:
    def __init__(self, role: str, model: str, blocks: int, window: "int | None" = None, beside: bool = False) -> None:
        ours: "dict[str, Any]" = {"kv_connector": "DeviceIpcConnector", "kv_connector_module_path": "device_ipc.vllm.kv", "kv_role": role}
        if beside:
            ours["kv_connector_extra_config"] = {"other_hosts": "pass", "claim_seconds": 0.5}
            network = {"kv_connector": "Network", "kv_connector_module_path": "vllm_schedulers", "kv_role": role}
            both = {"connectors": [ours, network]}
            ours = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": both}
        config = vllm_config.VllmConfig(
            scheduler_config=vllm_config.SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4000, enable_chunked_prefill=True, is_encoder_decoder=False
            ),
            model_config=vllm_config.ModelConfig(model=model, dtype="float16", seed=1, skip_tokenizer_init=True),
            cache_config=vllm_config.CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            kv_transfer_config=vllm_config.KVTransferConfig(**ours, kv_load_failure_policy="recompute"),
            device_config=vllm_config.DeviceConfig("cpu"),
        )
        sizes: "dict[str, Any]" = {"block_size": BLOCK_TOKENS, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float16}
        groups = [KVCacheGroupSpec(["layer.0", "layer.1"], FullAttentionSpec(**sizes))]
        if window is not None:
            groups.append(KVCacheGroupSpec(["window.0"], SlidingWindowSpec(**sizes, sliding_window=window)))
        self.groups = [list(group.layer_names) for group in groups]
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        shape = (blocks, 4, BLOCK_TOKENS, 32)
        self.caches = {name: torch.from_dlpack(device_ipc.empty(shape, "float16", "mock:0")).zero_() for names in self.groups for name in names}
        self.worker.register_kv_caches(self.caches)
        self.ended: "dict[str, Any]" = {}
        self.tokens: "dict[str, list[int]]" = {}

    def add(self, name: str, prompt: "list[int]", tokens: int, params: "dict[str, Any] | None") -> None:
        sampling = SamplingParams(max_tokens=tokens, extra_args={"kv_transfer_params": params}, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler.add_request(
            Request(request_id=name, prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None, block_hasher=hasher)
        )

    def blocks(self, name: str, tokens: int) -> "list[tuple[int, int, Any]]":
        """Returns the position, the number and the cache of each block of some tokens, without the null blocks before a window."""
        groups = zip(self.groups, self.scheduler.kv_cache_manager.get_block_ids(name), strict=True)
        blocks = [(names, enumerate(numbers[: tokens // BLOCK_TOKENS])) for names, numbers in groups]
        return [(at, block, self.caches[layer]) for names, numbers in blocks for at, block in numbers if block for layer in names]

    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        self.worker.start_load_kv(None)
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            if (request.kv_transfer_params or {}).get("do_remote_decode"):
                for at, block, cache in self.blocks(name, request.num_computed_tokens + BLOCK_TOKENS - 1):
                    cache[block] = number_of(request.prompt_token_ids[at * BLOCK_TOKENS :][:BLOCK_TOKENS])
            sampled.append([5] if request.num_computed_tokens >= request.num_prompt_tokens else [])
        output = KVConnectorOutput()
        if hasattr(base, "KVConnectorTransferResults"):
            results = self.worker.get_transfer_results(scheduled.finished_req_ids)
            output.finished_sending, output.finished_recving = results.finished_sending or None, results.finished_recving or None
            output.failed_recving = results.failed_recving
        else:
            output.finished_sending, output.finished_recving = self.worker.get_finished(scheduled.finished_req_ids)
        output.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=output,
        )
        for outputs in self.scheduler.update_from_output(scheduled, ran).values():
            for one in outputs.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = one

    def until(self, condition: "Callable[[], object]") -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            self.step()
            time.sleep(0.001)
            assert time.monotonic() < deadline


def prefill(engine: Engine, name: str, prompt: "list[int]") -> "dict[str, Any]":
    engine.add(name, prompt, 1, {"do_remote_decode": True})
    engine.until(lambda: name in engine.ended)
    return json.loads(json.dumps(engine.ended[name].kv_transfer_params))  # type: ignore[no-any-return]


def hand_over(model: str, requests: int, window: "int | None") -> None:
    first, second = Engine("kv_producer", model, 300, window), Engine("kv_consumer", model, 400, window)
    free = first.free(), second.free()
    for number in range(requests):
        length = LENGTHS[number % len(LENGTHS)]
        prompt = [3 + (7 * index + 31 * number) % 900 for index in range(length)]
        name = f"r{number}"
        second.add(name, prompt, 3, prefill(first, name, prompt))
        if number % 10 == 9:
            second.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            second.step()
            continue
        second.until(lambda: second.tokens.get(name))
        for at, block, cache in second.blocks(name, length):
            assert cache[block].eq(number_of(prompt[at * BLOCK_TOKENS :][:BLOCK_TOKENS])).all(), (name, at)
        second.until(lambda: name in second.ended)
        if number % 3 == 0:
            # The same prompt once more: its blocks are in the decode's cache.
            second.add(f"again {name}", prompt, 2, prefill(first, f"again {name}", prompt))
            second.until(lambda: f"again {name}" in second.ended)
    # An engine without requests makes no steps, and frees blocks in the next one.
    deadline = time.monotonic() + SECONDS
    while first.scheduler.requests:
        first.step()
        second.step()
        assert time.monotonic() < deadline
    assert (first.free(), second.free()) == free and not second.scheduler.requests
    if window is None or hasattr(base, "KVConnectorTransferResults"):
        # The prefill ends before its blocks were read: they are computed again.
        prompt = list(range(100))
        params = prefill(first, "last", prompt)
        first.worker.shutdown()
        second.add("last", prompt, 3, params)
        second.until(lambda: "last" in second.ended)
        assert second.tokens["last"] == [5, 5, 5] and second.free() == free[1]
    first.worker.shutdown()
    second.worker.shutdown()


def pass_on(model: str) -> None:
    """Hands requests over of which every second one comes from another host."""
    first, second = Engine("kv_producer", model, 300, beside=True), Engine("kv_consumer", model, 400, beside=True)
    free = first.free(), second.free()
    network = second.scheduler.connector._connectors[1]
    for number in range(6):
        prompt = [3 + (7 * index + 31 * number) % 900 for index in range(100)]
        name = f"r{number}"
        params = prefill(first, name, prompt)
        assert params["do_remote_prefill"] and params["remote_host"] == "there", params
        if number % 2:
            params["device_ipc"]["host"] = ["another boot", "elsewhere"]
        second.add(name, prompt, 3, params)
        second.until(lambda: second.tokens.get(name))
        assert (name in network.loaded) == bool(number % 2), (name, network.loaded)
        for at, block, cache in second.blocks(name, 100 if number % 2 == 0 else 0):
            assert cache[block].eq(number_of(prompt[at * BLOCK_TOKENS :][:BLOCK_TOKENS])).all(), (name, at)
        second.until(lambda: name in second.ended)
    deadline = time.monotonic() + SECONDS
    while first.scheduler.requests:
        first.step()
        second.step()
        assert time.monotonic() < deadline
    assert (first.free(), second.free()) == free and not second.scheduler.requests
    second.worker.shutdown()
    first.worker.shutdown()


def main(requests: int) -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        for window in (None, 64):
            hand_over(model, requests, window)
        pass_on(model)
    print(f"{requests} requests, all blocks equal, all returned")


if __name__ == "__main__":
    main(int(sys.argv[1]))

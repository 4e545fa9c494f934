"""vLLM's KV connector: a decode engine copies the blocks of a request from the prefill engine's cache on the same machine.

``--kv-transfer-config '{"kv_connector": "DeviceIpcConnector", "kv_connector_module_path": "device_ipc.vllm.kv", "kv_role": "kv_producer"}'``
for the prefill engine, ``"kv_consumer"`` for the decode engine. Imports vllm.
"""

from __future__ import annotations

import logging
import secrets
import socket
from array import array
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.v1.kv_cache_interface import MambaSpec

from .._kv_cache import CacheExporter, CacheImporter, Load

__all__ = ["DeviceIpcConnector"]

_logger = logging.getLogger(__name__)

_OURS = "device_ipc"
"""The key of this connector's part of ``kv_transfer_params``."""

# Since vLLM 0.33: until then a failed load is reported by the blocks of the only group.
_TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers for one step."""

    orders: list[tuple[Any, ...]]
    """Names of methods of the worker with their arguments, in their order."""


def _null_blocks(numbers: array[int]) -> int:
    """Returns the number of null blocks at the beginning: those before a window, whose number is 0."""
    data = numbers.tobytes()
    return (len(data) - len(data.lstrip(b"\0"))) // numbers.itemsize


class _Group:
    """A group of layers with one list of blocks for each request."""

    def __init__(self, position: int, group: Any) -> None:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            raise ValueError("DeviceIpcConnector supports models without recurrent states; this one has layers of Mamba or a relative of it")
        self.position = position
        self.layers = list(group.layer_names)
        self.tokens: int = spec.block_size
        self.window: int | None = getattr(spec, "sliding_window", None)
        self.chunk: int | None = getattr(spec, "attention_chunk_size", None)
        self.facts = [type(spec).__name__, self.tokens, self.window, self.chunk]

    @property
    def is_partial(self) -> bool:
        """Whether the engines give blocks back that the last tokens do not need."""
        return self.window is not None or self.chunk is not None

    def first_block(self, tokens: int) -> int:
        """Returns the first block that the computation of the last one of some tokens reads."""
        if self.window is not None:
            return max(0, tokens - self.window) // self.tokens
        if self.chunk is not None:
            return (tokens - 1) // self.chunk * self.chunk // self.tokens
        return 0


def _groups(kv_cache_config: Any) -> list[_Group]:
    """Returns the groups whose blocks are handed over."""
    groups = kv_cache_config.kv_cache_groups
    positions = getattr(kv_cache_config, "transfer_group_ids", range(len(groups)))
    return [_Group(position, groups[position]) for position in positions]


def _channel(engine: str, rank: int) -> str:
    """Returns the name to which the workers of other engines connect."""
    return f"kv-{engine}-{rank}"


class DeviceIpcConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands KV blocks from a prefill engine to a decode engine of the same machine.

    Extra configuration: ``claim_seconds`` (30), the time in which a decode engine has to claim the blocks of a request; ``other_hosts``,
    ``"fail"`` (the load of a request that another host has prefilled fails) or ``"pass"`` (it is left to the next connector of vLLM's
    MultiConnector).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise ValueError(f"DeviceIpcConnector supports one pipeline stage; there are {parallel.pipeline_parallel_size}")
        groups = _groups(kv_cache_config)
        if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            raise ValueError(
                "DeviceIpcConnector supports sleep mode since vLLM 0.33: earlier versions remap the caches without a notification"
            )
        self._failed_blocks: set[int] = set()
        self._loaded_groups = tuple(group.position for group in groups)
        self._part: Any = (
            _Scheduler(vllm_config, groups) if role == KVConnectorRole.SCHEDULER else _Worker(vllm_config, groups, kv_cache_config.num_blocks)
        )

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        """Claims the blocks of a request that waits, so that they stay while it waits."""
        self._part.new(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns the tokens whose blocks the prefill engine has."""
        return self._part.matched(request, num_computed_tokens)  # type: ignore[no-any-return]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begins a load, and notes a request whose blocks another engine is to read."""
        self._part.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Returns what the workers are to do in this step."""
        orders, self._part.orders = self._part.orders, []
        return Metadata(orders)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks of a request for the decode engine, and names them in the reply."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks of a request for the decode engine, and names them in the reply."""
        return self._part.finished(request, block_ids)  # type: ignore[no-any-return]

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns the groups of which a load brings the blocks: all."""
        return self._loaded_groups

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Shares the caches once, or prepares copies into them."""
        self._part.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Ends the connections and the export before sleep, which gives the memory back."""
        self._part.close()

    def restore_kv_caches(self) -> None:
        """Shares the caches again after sleep, under the same name."""
        self._part.register(self._part.caches)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Begins the loads of this step. Nothing waits for them."""
        orders = self._get_connector_metadata().orders
        if orders:
            self._part.step(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: requests run after their blocks have come."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Does nothing: the blocks stay where they are."""

    def wait_for_save(self) -> None:
        """Does nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose blocks were read, and those whose blocks have come. Failed loads among them have failed blocks."""
        sent, come, failed = self._part.poll()
        for load in failed:
            if len(load.parts) > 1:
                raise RuntimeError(
                    f"the KV blocks of request {load.request} have not come, and this version of vLLM accepts no report of a failed load for a "
                    "model with several groups of KV caches; use vLLM 0.33 or later, or --disable-hybrid-kv-cache-manager"
                )
            self._failed_blocks.update(load.parts[0][1])
        return sent or None, come or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns what has ended and what has failed, for vLLM 0.33 or later, which does not ask for blocks."""
        sent, come, failed = self._part.poll()
        return _TransferResults(sent, come, {load.request for load in failed})

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks of failed loads."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        """Ends the connections and the export."""
        self._part.close()


class _Scheduler:
    def __init__(self, vllm_config: Any, groups: list[_Group]) -> None:
        self.orders: list[tuple[Any, ...]] = []
        """Those for the next step."""
        self._groups = groups
        transfer = vllm_config.kv_transfer_config
        self._reads = transfer.is_kv_consumer
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._engine = transfer.engine_id
        # The first says where an engine runs: containers of one machine have names of their own.
        self._host = [_read("/proc/sys/kernel/random/boot_id"), socket.gethostname()]
        other_hosts = transfer.get_from_extra_config("other_hosts", "fail")
        if other_hosts not in ("fail", "pass"):
            raise ValueError(f"other_hosts is {other_hosts!r}; it must be 'fail' or 'pass'")
        self._passes = other_hosts == "pass"
        # The last token is computed here. Windows must reach back from it, not from the one behind it.
        self._recomputed = int(any(group.is_partial for group in groups))
        # An engine that is started again under the same name knows no ticket of the one before it. 52 bits are exact in all of JSON.
        self._next = secrets.randbits(51)
        self._tickets: dict[str, int] = {}

    def new(self, request: Any) -> None:
        remote = self._remote(request)
        if remote is not None and self._is_here(remote):
            self.orders.append(("claim", remote["engine"], remote["ticket"]))

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        remote = self._remote(request)
        if remote is None:
            return 0, False
        count = len(request.prompt_token_ids or ()) - self._recomputed - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        name = request.request_id
        if params.get("do_remote_decode") and name not in self._tickets:
            self._next += 1
            self._tickets[name] = self._next
            self.orders.append(("offer", self._next, name))
        remote = self._remote(request)
        if remote is None:
            return
        params[_OURS] = None  # once for a request
        if external <= 0:
            # All blocks are here already, from an earlier request.
            self._release(remote)
            return
        known = len(request.prompt_token_ids or ()) - self._recomputed - external
        load = Load(name, remote["ticket"], [])
        for group, (skipped, text) in zip(self._groups, remote["blocks"], strict=True):
            sources = array("I", bytes.fromhex(text))
            first = max(skipped, known // group.tokens)
            # Of vLLM's objects, by the fastest way: the interpreter reads attributes of one class without a call, and an array takes a
            # list whole.
            destinations = array("I", [block.block_id for block in blocks.blocks[group.position][first : skipped + len(sources)]])
            null = _null_blocks(destinations)
            first, destinations = first + null - skipped, destinations[null:]
            load.parts.append((sources[first : first + len(destinations)], destinations))
        if self._is_here(remote):
            claim = ("claim", remote["engine"], remote["ticket"])
            if claim in self.orders:
                # Of this step, in which the load itself claims the blocks.
                self.orders.remove(claim)
            self.orders.append(("load", remote["engine"], load))
        else:
            load.failure = (
                f"they are on the host {remote['host'][1]}, and this engine is on {self._host[1]}; set other_hosts to 'pass', with NIXL's "
                "connector behind this one in a MultiConnector"
            )
            self.orders.append(("refuse", load))

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not params:
            return False, None
        remote = self._remote(request)
        if remote is not None:
            # Aborted before it was scheduled.
            params[_OURS] = None
            self._release(remote)
            return False, None
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:
            return False, None
        from vllm.v1.request import RequestStatus

        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not ended or not any(block_ids):
            self.orders.append(("withdraw", ticket))
            return False, None
        self.orders.append(("lend", ticket))
        blocks = []
        for group in self._groups:
            numbers = array("I", block_ids[group.position])
            null = _null_blocks(numbers)
            # Python reads this text ten times as fast as Base64.
            blocks.append([null, numbers[null:].tobytes().hex()])
        ours = {"engine": self._engine, "host": self._host, "ranks": self._ranks, "ticket": ticket, "blocks": blocks}
        # vLLM knows such requests by the first two, which NIXL's connector adds itself.
        return True, {_OURS: ours} if self._passes else {"do_remote_prefill": True, "do_remote_decode": False, _OURS: ours}

    def _is_here(self, remote: dict[str, Any]) -> bool:
        return bool(remote["host"][0] == self._host[0])

    def _release(self, remote: dict[str, Any]) -> None:
        if self._is_here(remote):
            self.orders.append(("release", remote["engine"], remote["ticket"]))

    def _remote(self, request: Any) -> dict[str, Any] | None:
        """Returns the prefill engine's parameters of a request whose blocks are still to be read."""
        params = request.kv_transfer_params
        if not params:
            return None
        remote = params.get(_OURS)
        if remote is None:
            if params.get("do_remote_prefill") and _OURS not in params:
                params[_OURS] = None
                if not self._passes:
                    _logger.warning("request %s: kv_transfer_params are not of a DeviceIpcConnector; computed here", request.request_id)
            return None
        if not self._is_here(remote) and self._passes:
            return None
        reason = self._unusable(request, remote)
        if reason is None:
            return remote  # type: ignore[no-any-return]
        _logger.warning("request %s: %s; computed here", request.request_id, reason)
        params[_OURS] = None
        self._release(remote)
        return None

    def _unusable(self, request: Any, remote: dict[str, Any]) -> str | None:
        """Returns the reason why blocks of the prefill engine cannot be used."""
        if not self._reads:
            return "this engine is a kv_producer, which reads no blocks"
        if remote["ranks"] != self._ranks:
            return f"tensor parallel size {remote['ranks']} there, {self._ranks} here"
        if len(remote["blocks"]) != len(self._groups):
            return f"{len(remote['blocks'])} groups of KV caches there, {len(self._groups)} here"
        tokens = len(request.prompt_token_ids or ())
        for group, (skipped, _) in zip(self._groups, remote["blocks"], strict=True):
            if skipped > group.first_block(tokens):
                return f"the prefill engine has given back the block {group.first_block(tokens)} that the last token's window begins in"
        return None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


class _Worker:
    def __init__(self, vllm_config: Any, groups: list[_Group], blocks: int) -> None:
        self.caches: dict[str, Any] = {}
        self._refused: list[Load] = []
        self._exporter: CacheExporter | None = None
        self._importer: CacheImporter | None = None
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        self._exports = transfer.is_kv_producer
        self._imports = transfer.is_kv_consumer
        self._limit = float(transfer.get_from_extra_config("claim_seconds", 30))
        self._rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
        self._name = _channel(transfer.engine_id, self._rank)
        self._blocks = blocks
        self._groups = [group.layers for group in groups]
        self._facts = {
            "model": model.model,
            "revision": model.revision,
            "groups of KV caches": [group.facts for group in groups],
            "type of the cache": str(vllm_config.cache_config.cache_dtype),
            "tensor parallel size": vllm_config.parallel_config.tensor_parallel_size,
        }

    def register(self, caches: dict[str, Any]) -> None:
        self.caches = caches
        if self._exports and self._exporter is None:
            self._exporter = CacheExporter(self._name, caches, self._blocks, self._facts, self._limit)
        if self._imports and self._importer is None:
            self._importer = CacheImporter(caches, self._groups, self._blocks, self._facts)

    def step(self, orders: list[tuple[Any, ...]]) -> None:
        for order, *arguments in orders:
            getattr(self, order)(*arguments)
        if self._importer is not None:
            self._importer.submit()

    # Orders of the scheduler.

    def offer(self, ticket: int, request: str) -> None:
        if self._exporter is not None:
            self._exporter.offer(ticket, request)

    def withdraw(self, ticket: int) -> None:
        if self._exporter is not None:
            self._exporter.withdraw(ticket)

    def lend(self, ticket: int) -> None:
        if self._exporter is not None:
            self._exporter.lend(ticket)

    def claim(self, engine: str, ticket: int) -> None:
        if self._importer is not None:
            self._importer.claim(_channel(engine, self._rank), ticket)

    def load(self, engine: str, load: Load) -> None:
        if self._importer is not None:
            self._importer.load(_channel(engine, self._rank), load)

    def release(self, engine: str, ticket: int) -> None:
        if self._importer is not None:
            self._importer.release(_channel(engine, self._rank), ticket)

    def refuse(self, load: Load) -> None:
        """Reports a load that has failed before it began."""
        self._refused.append(load)

    def poll(self) -> tuple[set[str], set[str], list[Load]]:
        """Returns requests that were read, requests whose loads have ended, and the loads among them that have failed."""
        sent = self._exporter.returned() if self._exporter is not None else set()
        if self._importer is None:
            return sent, set(), []
        come, failures = self._importer.poll()
        if self._refused:
            failures += [(load, load.failure or "") for load in self._refused]
            self._refused.clear()
        for load, reason in failures:
            _logger.error("the KV blocks of request %s have not come: %s", load.request, reason)
            come.add(load.request)
        return sent, come, [load for load, _ in failures]

    def close(self) -> None:
        importer, self._importer = self._importer, None
        if importer is not None:
            importer.close()
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

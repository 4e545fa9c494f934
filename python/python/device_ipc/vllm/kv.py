"""vLLM's KV connector: a decode engine copies the blocks of a request from the prefill engine's cache on the same machine.

``--kv-transfer-config '{"kv_connector": "DeviceIpcConnector", "kv_connector_module_path": "device_ipc.vllm.kv", "kv_role": "kv_producer"}'``
for the prefill engine, ``"kv_consumer"`` for the decode engine. Imports vllm.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from array import array
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.v1.kv_cache_interface import MambaSpec

from .._kv_cache import BlockPool, CacheExporter, CacheImporter, Load, pack_blocks

__all__ = ["DeviceIpcConnector"]

_logger = logging.getLogger(__name__)

_OURS = "device_ipc"
"""The key of this connector's part of ``kv_transfer_params``."""

_VERSION = 2
"""The version of that part. Version 1, which had no number, named each block."""

# Since vLLM 0.33: until then a failed load is reported by the blocks of the only group.
_TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers for one step."""

    orders: list[tuple[Any, ...]]
    """Names of methods of the worker with their arguments, in their order."""
    loads: dict[str, list[Load]]
    """Loads by the names of the prefill engines, after the orders."""
    is_idle: bool
    """Whether the step computes nothing."""


_NOTHING = {is_idle: Metadata([], {}, is_idle) for is_idle in (False, True)}

_IDLE_SECONDS = 0.001
"""The time in which a step that computes nothing waits for a copy, as the next step would only look for its end."""


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

    An object is of one of two subclasses, by its role. vLLM calls some of their methods in each step, so they do the work themselves.
    """

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> DeviceIpcConnector:
        return super().__new__(_Scheduler if role == KVConnectorRole.SCHEDULER else _Worker)  # type: ignore[no-any-return]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise ValueError(f"DeviceIpcConnector supports one pipeline stage; there are {parallel.pipeline_parallel_size}")
        if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            raise ValueError(
                "DeviceIpcConnector supports sleep mode since vLLM 0.33: earlier versions remap the caches without a notification"
            )
        self._groups = _groups(kv_cache_config)

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns the tokens whose blocks the prefill engine has."""
        raise NotImplementedError

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begins a load, and notes a request whose blocks another engine is to read."""
        raise NotImplementedError

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Returns what the workers are to do in this step."""
        raise NotImplementedError

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks of a request for the decode engine, and names them in the reply."""
        raise NotImplementedError

    # The worker's side.

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Begins the loads of this step. Nothing waits for them."""
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: requests run after their blocks have come."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Does nothing: the blocks stay where they are."""

    def wait_for_save(self) -> None:
        """Does nothing."""


class _Scheduler(DeviceIpcConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Of the next step.
        self._orders: list[tuple[Any, ...]] = []
        self._loads: dict[str, list[Load]] = {}
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
        self._recomputed = int(any(group.is_partial for group in self._groups))
        # An engine that is started again under the same name knows no ticket of the one before it. 52 bits are exact in all of JSON.
        self._next = secrets.randbits(51)
        self._tickets: dict[str, int] = {}
        """Those of requests whose blocks another engine is to read."""
        self._remotes: dict[str, dict[str, Any]] = {}
        """The prefill engine's parameters of requests whose blocks are still to be read."""
        self._new: list[str] = []
        """The requests among them that have arrived since the last step."""
        self._pool = BlockPool([])

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Notes the objects of blocks."""
        self._pool = BlockPool(gpu_block_pool.blocks)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns the groups of which a load brings the blocks: all."""
        return tuple(group.position for group in self._groups)

    def on_new_request(self, request: Any) -> None:
        """Claims the blocks of a request that waits, so that they stay while it waits."""
        if request.kv_transfer_params and self._remote(request) is not None:
            self._new.append(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self._remote(request) is None:
            return 0, False
        count = len(request.prompt_token_ids or ()) - self._recomputed - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        name = request.request_id
        if params.get("do_remote_decode") and name not in self._tickets:
            self._next += 1
            self._tickets[name] = self._next
            self._orders.append(("offer", self._next, name))
        remote = self._remote(request)
        if remote is None:
            return
        # Once for a request.
        params[_OURS] = None
        del self._remotes[name]
        if num_external_tokens <= 0:
            # All blocks are here already, from an earlier request.
            self._release(remote)
            return
        known = len(request.prompt_token_ids or ()) - self._recomputed - num_external_tokens
        parts = []
        for group, (skipped, count, text) in zip(self._groups, remote["blocks"], strict=True):
            first = known // group.tokens
            if first < skipped:
                first = skipped
            null, destinations = self._pool.read(blocks.blocks[group.position], first, skipped + count)
            parts.append((text, first + null - skipped, destinations))
        engine, load = remote["engine"], (name, remote["ticket"], parts)
        if remote["host"][0] != self._host[0]:
            reason = (
                f"they are on the host {remote['host'][1]}, and this engine is on {self._host[1]}; set other_hosts to 'pass', with NIXL's "
                "connector behind this one in a MultiConnector"
            )
            self._orders.append(("refuse", load, reason))
        elif engine in self._loads:
            self._loads[engine].append(load)
        else:
            self._loads[engine] = [load]

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        if self._new:
            new, self._new = self._new, []
            for name in new:
                # Loads of this step claim their blocks themselves.
                if name in self._remotes and self._is_here(self._remotes[name]):
                    self._orders.append(("claim", self._remotes[name]["engine"], self._remotes[name]["ticket"]))
        is_idle = not scheduler_output.total_num_scheduled_tokens
        if not self._orders and not self._loads:
            return _NOTHING[is_idle]
        metadata = Metadata(self._orders, self._loads, is_idle)
        self._orders, self._loads = [], {}
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks of a request for the decode engine, and names them in the reply."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        if not request.kv_transfer_params:
            return False, None
        remote = self._remote(request)
        if remote is not None:
            # Aborted before it was scheduled.
            self._forget(request)
            self._release(remote)
            return False, None
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:
            return False, None
        from vllm.v1.request import RequestStatus

        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not ended or not any(block_ids):
            self._orders.append(("withdraw", ticket))
            return False, None
        self._orders.append(("lend", ticket))
        blocks = [pack_blocks(block_ids[group.position]) for group in self._groups]
        ours = {
            "version": _VERSION, "engine": self._engine, "host": self._host, "ranks": self._ranks, "ticket": ticket, "blocks": blocks,
        }  # fmt: skip
        # vLLM knows such requests by the first two, which NIXL's connector adds itself.
        return True, {_OURS: ours} if self._passes else {"do_remote_prefill": True, "do_remote_decode": False, _OURS: ours}

    def _is_here(self, remote: dict[str, Any]) -> bool:
        return bool(remote["host"][0] == self._host[0])

    def _release(self, remote: dict[str, Any]) -> None:
        if self._is_here(remote):
            self._orders.append(("release", remote["engine"], remote["ticket"]))

    def _forget(self, request: Any) -> None:
        """Notes that the blocks of a request are not to be read any more."""
        request.kv_transfer_params[_OURS] = None
        self._remotes.pop(request.request_id, None)

    def _remote(self, request: Any) -> dict[str, Any] | None:
        """Returns the prefill engine's parameters of a request whose blocks are still to be read. Looks at them once."""
        known = self._remotes.get(request.request_id)
        params = request.kv_transfer_params
        if known is not None or not params:
            return known
        remote: dict[str, Any] | None = params.get(_OURS)
        if remote is None:
            if params.get("do_remote_prefill") and _OURS not in params:
                params[_OURS] = None
                if not self._passes:
                    _logger.warning("request %s: kv_transfer_params are not of a DeviceIpcConnector; computed here", request.request_id)
            return None
        try:
            if remote["host"][0] != self._host[0] and self._passes:
                return None
            reason = self._unusable(request, remote)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"kv_transfer_params are not valid: {error!r}"
        if reason is None:
            self._remotes[request.request_id] = remote
            return remote
        _logger.warning("request %s: %s; computed here", request.request_id, reason)
        self._forget(request)
        with contextlib.suppress(LookupError, TypeError):
            self._release(remote)
        return None

    def _unusable(self, request: Any, remote: dict[str, Any]) -> str | None:
        """Returns the reason why blocks of the prefill engine cannot be used."""
        if remote.get("version", 1) != _VERSION:
            return f"kv_transfer_params have version {remote.get('version', 1)}, not {_VERSION}: the engines have different versions of device-ipc"
        if not self._reads:
            return "this engine is a kv_producer, which reads no blocks"
        if remote["ranks"] != self._ranks:
            return f"tensor parallel size {remote['ranks']} there, {self._ranks} here"
        if len(remote["blocks"]) != len(self._groups):
            return f"{len(remote['blocks'])} groups of KV caches there, {len(self._groups)} here"
        if type(remote["engine"]) is not str or type(remote["ticket"]) is not int:
            raise ValueError("its engine or its ticket")
        for group, (skipped, count, text) in zip(self._groups, remote["blocks"], strict=True):
            if not (type(skipped) is type(count) is int and type(text) is str and skipped >= 0 <= count):
                raise ValueError("its blocks")
            if skipped and skipped > (needed := group.first_block(len(request.prompt_token_ids or ()))):
                return f"the prefill engine has given back the block {needed} that the last token's window begins in"
        return None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


class _Worker(DeviceIpcConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: dict[str, Any] = {}
        self._refused: list[tuple[Load, str]] = []
        self._failed_blocks: set[int] = set()
        self._wait_seconds = 0.0
        """The time in which this step waits for the end of a copy."""
        self._exporter: CacheExporter | None = None
        self._importer: CacheImporter | None = None
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        self._exports = transfer.is_kv_producer
        self._imports = transfer.is_kv_consumer
        self._limit = float(transfer.get_from_extra_config("claim_seconds", 30))
        self._rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
        self._name = _channel(transfer.engine_id, self._rank)
        self._blocks = kv_cache_config.num_blocks
        self._facts = {
            "model": model.model,
            "revision": model.revision,
            "groups of KV caches": [group.facts for group in self._groups],
            "type of the cache": str(vllm_config.cache_config.cache_dtype),
            "tensor parallel size": vllm_config.parallel_config.tensor_parallel_size,
        }

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Shares the caches once, or prepares copies into them."""
        self._caches = kv_caches
        if self._exports and self._exporter is None:
            self._exporter = CacheExporter(self._name, kv_caches, self._blocks, self._facts, self._limit)
        if self._imports and self._importer is None:
            self._importer = CacheImporter(kv_caches, [group.layers for group in self._groups], self._blocks, self._facts)

    def unregister_kv_caches(self) -> None:
        """Ends the connections and the export before sleep, which gives the memory back."""
        self.shutdown()

    def restore_kv_caches(self) -> None:
        """Shares the caches again after sleep, under the same name."""
        self.register_kv_caches(self._caches)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        metadata = self._get_connector_metadata()
        self._wait_seconds = _IDLE_SECONDS if metadata.is_idle else 0.0
        for order, *arguments in metadata.orders:
            getattr(self, order)(*arguments)
        if metadata.loads and self._importer is not None:
            for engine, loads in metadata.loads.items():
                self._importer.load(_channel(engine, self._rank), loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose blocks were read, and those whose blocks have come. Failed loads among them have failed blocks."""
        sent = self._exporter.returned() if self._exporter is not None else None
        ended = self._importer.poll(self._wait_seconds) if self._importer is not None else None
        if ended is None and not self._refused:
            return sent or None, None
        come, failed = ended or (set(), [])
        if not failed and not self._refused:
            return sent or None, come or None
        for request, _, parts in self._report(come, failed):
            if len(parts) > 1:
                raise RuntimeError(
                    f"the KV blocks of request {request} have not come, and this version of vLLM accepts no report of a failed load for a "
                    "model with several groups of KV caches; use vLLM 0.33 or later, or --disable-hybrid-kv-cache-manager"
                )
            self._failed_blocks.update(array("I", parts[0][2]))
        return sent or None, come or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns what has ended and what has failed, for vLLM 0.33 or later, which does not ask for blocks."""
        sent = self._exporter.returned() if self._exporter is not None else set()
        come, failed = self._importer and self._importer.poll(self._wait_seconds) or (set(), [])
        return _TransferResults(sent, come, {load[0] for load in self._report(come, failed)})

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks of failed loads."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        """Ends the connections and the export."""
        importer, self._importer = self._importer, None
        if importer is not None:
            importer.close()
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def _report(self, come: set[str], failed: list[tuple[Load, str]]) -> list[Load]:
        """Returns the loads that have failed, with those that were refused, and adds their requests to those whose loads have ended."""
        failed += self._refused
        self._refused.clear()
        for load, reason in failed:
            _logger.error("the KV blocks of request %s have not come: %s", load[0], reason)
            come.add(load[0])
        return [load for load, _ in failed]

    # Orders of the scheduler.

    def offer(self, ticket: int, request: str) -> None:
        """Announces a request whose blocks are being computed."""
        if self._exporter is not None:
            self._exporter.offer(ticket, request)

    def withdraw(self, ticket: int) -> None:
        """Takes an offer back."""
        if self._exporter is not None:
            self._exporter.withdraw(ticket)

    def lend(self, ticket: int) -> None:
        """Keeps the blocks of a request until they were read."""
        if self._exporter is not None:
            self._exporter.lend(ticket)

    def claim(self, engine: str, ticket: int) -> None:
        """Makes a prefill engine keep the blocks of a request that waits."""
        if self._importer is not None:
            self._importer.claim(_channel(engine, self._rank), ticket)

    def release(self, engine: str, ticket: int) -> None:
        """Gives blocks up that are not to be read."""
        if self._importer is not None:
            self._importer.release(_channel(engine, self._rank), ticket)

    def refuse(self, load: Load, reason: str) -> None:
        """Reports a load that has failed before it began."""
        self._refused.append((load, reason))

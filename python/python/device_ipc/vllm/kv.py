"""vLLM's KV connector: a decode engine copies the blocks of a request from the prefill engine's cache on the same machine.

``--kv-transfer-config '{"kv_connector": "DeviceIpcConnector", "kv_connector_module_path": "device_ipc.vllm.kv", "kv_role": "kv_producer"}'``
for the prefill engine, ``"kv_consumer"`` for the decode engine. Imports vllm.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from .._kv_cache import CacheExporter, CacheImporter, Load

__all__ = ["DeviceIpcConnector"]

_logger = logging.getLogger(__name__)

_OURS = "device_ipc"
"""The key of this connector's part of ``kv_transfer_params``."""

_block_id = attrgetter("block_id")


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers for one step. Requests of other engines are pairs of the engine and the ticket there."""

    offered: dict[int, str] = field(default_factory=dict)
    lent: list[int] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
    claimed: list[tuple[str, int]] = field(default_factory=list)
    loads: list[tuple[str, Load]] = field(default_factory=list)
    released: list[tuple[str, int]] = field(default_factory=list)


def _channel(engine: str, rank: int) -> str:
    """Returns the name to which the workers of other engines connect."""
    return f"kv-{engine}-{rank}"


class DeviceIpcConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Hands KV blocks from a prefill engine to a decode engine of the same machine.

    Extra configuration: ``claim_seconds`` (30), the time in which a decode engine has to claim the blocks of a request.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(f"DeviceIpcConnector supports models with one group of KV caches; this one has {len(groups)}")
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise ValueError(f"DeviceIpcConnector supports one pipeline stage; there are {parallel.pipeline_parallel_size}")
        self._part: Any = _Scheduler(vllm_config) if role == KVConnectorRole.SCHEDULER else _Worker(vllm_config, kv_cache_config)

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
        metadata, self._part.metadata = self._part.metadata, Metadata()
        return metadata  # type: ignore[no-any-return]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks of a request for the decode engine, and names them in the reply."""
        return self._part.finished(request, block_ids)  # type: ignore[no-any-return]

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Shares the caches once, or prepares copies into them."""
        self._part.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Begins the loads of this step. Nothing waits for them."""
        self._part.step(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: requests run after their blocks have come."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Does nothing: the blocks stay where they are."""

    def wait_for_save(self) -> None:
        """Does nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose blocks were read, and those whose blocks have come."""
        return self._part.poll()  # type: ignore[no-any-return]

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks of failed loads."""
        failed, self._part.failed = self._part.failed, set()
        return failed  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        """Ends the connections and the export."""
        self._part.close()


class _Scheduler:
    def __init__(self, vllm_config: Any) -> None:
        self.metadata = Metadata()
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._block_tokens = vllm_config.cache_config.block_size
        self._engine = vllm_config.kv_transfer_config.engine_id
        # An engine that is started again under the same name knows no ticket of the one before it. 52 bits are exact in all of JSON.
        self._next = secrets.randbits(51)
        self._tickets: dict[str, int] = {}

    def new(self, request: Any) -> None:
        remote = self._remote(request)
        if remote is not None:
            self.metadata.claimed.append((remote["engine"], remote["ticket"]))

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        if self._remote(request) is None:
            return 0, False
        count = len(request.prompt_token_ids or ()) - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        name = request.request_id
        if params.get("do_remote_decode") and name not in self._tickets:
            self._next += 1
            self._tickets[name] = self._next
            self.metadata.offered[self._next] = name
        remote = self._remote(request)
        if remote is None:
            return
        params[_OURS] = None  # once for a request
        if external > 0:
            known = (len(request.prompt_token_ids or ()) - external) // self._block_tokens
            sources = array("I", b64decode(remote["blocks"]))[known:]
            destinations = array("I", map(_block_id, blocks.blocks[0][known : known + len(sources)]))
            load = Load(name, remote["ticket"], [(sources, destinations)])
            self.metadata.loads.append((remote["engine"], load))
        else:
            # All blocks are here already, from an earlier request.
            self.metadata.released.append((remote["engine"], remote["ticket"]))

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not params:
            return False, None
        remote = self._remote(request)
        if remote is not None:
            # Aborted before it was scheduled.
            params[_OURS] = None
            self.metadata.released.append((remote["engine"], remote["ticket"]))
            return False, None
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:
            return False, None
        from vllm.v1.request import RequestStatus

        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not ended or not block_ids:
            self.metadata.withdrawn.append(ticket)
            return False, None
        self.metadata.lent.append(ticket)
        blocks = b64encode(array("I", block_ids)).decode()
        ours = {"engine": self._engine, "ranks": self._ranks, "ticket": ticket, "blocks": blocks}
        return True, {"do_remote_prefill": True, "do_remote_decode": False, _OURS: ours}

    def _remote(self, request: Any) -> dict[str, Any] | None:
        """Returns the prefill engine's parameters of a request whose blocks are still to be read."""
        params = request.kv_transfer_params
        if not params:
            return None
        remote = params.get(_OURS)
        if remote is None:
            if params.get("do_remote_prefill") and _OURS not in params:
                _logger.warning("request %s: kv_transfer_params are not of a DeviceIpcConnector; computed here", request.request_id)
                params[_OURS] = None
        elif remote["ranks"] != self._ranks:
            _logger.warning(
                "request %s: tensor parallel size %d there, %d here; computed here", request.request_id, remote["ranks"], self._ranks
            )
            params[_OURS] = remote = None
        return remote  # type: ignore[no-any-return]


class _Worker:
    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.failed: set[int] = set()
        self._exporter: CacheExporter | None = None
        self._importer: CacheImporter | None = None
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        self._exports = transfer.is_kv_producer
        self._imports = transfer.is_kv_consumer
        self._limit = float(transfer.get_from_extra_config("claim_seconds", 30))
        self._rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
        self._name = _channel(transfer.engine_id, self._rank)
        self._blocks = kv_cache_config.num_blocks
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._facts = {
            "model": model.model,
            "revision": model.revision,
            "tokens of a block": vllm_config.cache_config.block_size,
            "type of the cache": str(vllm_config.cache_config.cache_dtype),
            "tensor parallel size": vllm_config.parallel_config.tensor_parallel_size,
        }

    def register(self, caches: dict[str, Any]) -> None:
        if self._exports:
            self._exporter = CacheExporter(self._name, caches, self._blocks, self._facts, self._limit)
        if self._imports:
            self._importer = CacheImporter(caches, self._groups, self._blocks, self._facts)

    def step(self, metadata: Metadata) -> None:
        if self._exporter is not None:
            for ticket, request in metadata.offered.items():
                self._exporter.offer(ticket, request)
            for ticket in metadata.withdrawn:
                self._exporter.withdraw(ticket)
            for ticket in metadata.lent:
                self._exporter.lend(ticket)
        importer = self._importer
        if importer is None or not (metadata.claimed or metadata.loads or metadata.released):
            return
        for engine, ticket in metadata.claimed:
            importer.claim(_channel(engine, self._rank), ticket)
        for engine, load in metadata.loads:
            importer.load(_channel(engine, self._rank), load)
        for engine, ticket in metadata.released:
            importer.release(_channel(engine, self._rank), ticket)
        importer.submit()

    def poll(self) -> tuple[set[str] | None, set[str] | None]:
        sent = self._exporter.returned() if self._exporter is not None else None
        if self._importer is None:
            return sent or None, None
        come, failures = self._importer.poll()
        for load, reason in failures:
            _logger.error("the KV blocks of request %s have not come: %s", load.request, reason)
            for _, destinations in load.parts:
                self.failed.update(destinations)
            come.add(load.request)
        return sent or None, come or None

    def close(self) -> None:
        if self._importer is not None:
            self._importer.close()
        if self._exporter is not None:
            self._exporter.close()

"""vLLM's KV connector: a decode engine copies the blocks of a request from the prefill engine's cache on the same machine.

``--kv-transfer-config '{"kv_connector": "DeviceIpcConnector", "kv_connector_module_path": "device_ipc.vllm.kv", "kv_role": "kv_producer"}'``
for the prefill engine, ``"kv_consumer"`` for the decode engine. Imports vllm.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from .._kv_cache import CacheExporter, CacheImporter, Load

__all__ = ["DeviceIpcConnector"]

_logger = logging.getLogger(__name__)

_REMOTE = ("remote_request_id", "remote_block_ids", "remote_channels")


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the scheduler learns of a worker."""

    channel: str


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers for one step."""

    offered: set[str] = field(default_factory=set)
    lent: set[str] = field(default_factory=set)
    withdrawn: set[str] = field(default_factory=set)
    claimed: list[dict[str, Any]] = field(default_factory=list)
    loads: list[tuple[str, int, list[int], dict[str, Any]]] = field(default_factory=list)
    """Requests, the blocks at the beginning that are here already, the blocks for the others, and the prefill engine's parameters."""
    released: list[dict[str, Any]] = field(default_factory=list)


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

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Takes the names of the workers' channels."""
        self._part.channels = [metadata[rank].channel for rank in sorted(metadata)]

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

    def get_handshake_metadata(self) -> Handshake | None:
        """Returns the name of this worker's channel."""
        exporter = self._part.exporter
        return None if exporter is None else Handshake(exporter.name)

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
        self.channels: list[str] = []
        self.metadata = Metadata()
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._block_tokens = vllm_config.cache_config.block_size
        self._engine = vllm_config.kv_transfer_config.engine_id
        self.exporter = None

    def new(self, request: Any) -> None:
        params = self._remote(request)
        if params is not None:
            self.metadata.claimed.append(params)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        if self._remote(request) is None:
            return 0, False
        count = len(request.prompt_token_ids or ()) - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self.metadata.offered.add(request.request_id)
        remote = self._remote(request)
        if remote is None:
            return
        params["do_remote_prefill"] = False  # once for a request
        if external > 0:
            known = (len(request.prompt_token_ids or ()) - external) // self._block_tokens
            self.metadata.loads.append((request.request_id, known, blocks.get_unhashed_block_ids(), remote))
        else:
            # All blocks are here already, from an earlier request.
            self.metadata.released.append(remote)

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        from vllm.v1.request import RequestStatus

        params = request.kv_transfer_params or {}
        remote = self._remote(request)
        if remote is not None:
            # Aborted before it was scheduled.
            params["do_remote_prefill"] = False
            self.metadata.released.append(remote)
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not ended or not block_ids or not self.channels:
            self.metadata.withdrawn.add(request.request_id)
            return False, None
        self.metadata.lent.add(request.request_id)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_block_ids": list(block_ids),
            "remote_channels": self.channels,
            "tp_size": self._ranks,
        }

    def _remote(self, request: Any) -> dict[str, Any] | None:
        """Returns the prefill engine's parameters of a request whose blocks are still to be read."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        if any(name not in params for name in _REMOTE):
            _logger.warning("request %s: kv_transfer_params are not of a DeviceIpcConnector; computed here", request.request_id)
        elif len(params["remote_channels"]) != self._ranks:
            there = len(params["remote_channels"])
            _logger.warning("request %s: tensor parallel size %d there, %d here; computed here", request.request_id, there, self._ranks)
        else:
            return {name: params[name] for name in _REMOTE}
        params["do_remote_prefill"] = False
        return None


class _Worker:
    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.exporter: CacheExporter | None = None
        self.failed: set[int] = set()
        self._importer: CacheImporter | None = None
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        self._exports = transfer.is_kv_producer
        self._imports = transfer.is_kv_consumer
        self._limit = float(transfer.get_from_extra_config("claim_seconds", 30))
        self._rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
        self._blocks = kv_cache_config.num_blocks
        self._facts = {
            "model": model.model,
            "revision": model.revision,
            "tokens of a block": vllm_config.cache_config.block_size,
            "type of the cache": str(vllm_config.cache_config.cache_dtype),
            "tensor parallel size": vllm_config.parallel_config.tensor_parallel_size,
        }

    def register(self, caches: dict[str, Any]) -> None:
        if self._exports:
            self.exporter = CacheExporter(caches, self._blocks, self._facts, self._limit)
        if self._imports:
            self._importer = CacheImporter(caches, self._blocks, self._facts)

    def step(self, metadata: Metadata) -> None:
        if self.exporter is not None:
            for request in metadata.offered:
                self.exporter.offer(request)
            for request in metadata.withdrawn:
                self.exporter.withdraw(request)
            for request in metadata.lent:
                self.exporter.lend(request)
        if self._importer is None:
            return
        for remote in metadata.claimed:
            self._importer.claim(remote["remote_channels"][self._rank], remote["remote_request_id"])
        for request, known, blocks, remote in metadata.loads:
            sources = remote["remote_block_ids"][known:]
            load = Load(request, remote["remote_request_id"], sources, blocks[: len(sources)])
            self._importer.load(remote["remote_channels"][self._rank], load)
        for remote in metadata.released:
            self._importer.release(remote["remote_channels"][self._rank], remote["remote_request_id"])

    def poll(self) -> tuple[set[str] | None, set[str] | None]:
        sent = self.exporter.returned() if self.exporter is not None else set()
        come: set[str] = set()
        if self._importer is not None:
            come, failures = self._importer.poll()
            for load, reason in failures:
                _logger.error("the KV blocks of request %s have not come: %s", load.request, reason)
                self.failed.update(load.destinations)
                come.add(load.request)
        return sent or None, come or None

    def close(self) -> None:
        if self._importer is not None:
            self._importer.close()
        if self.exporter is not None:
            self.exporter.close()

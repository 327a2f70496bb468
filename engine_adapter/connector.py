"""The KV connector that vLLM loads: `HeadstartConnector`.

Loaded out of tree by `--kv-transfer-config` (see launcher.py). Tested with the vLLM versions in
TESTED_VLLM; connector APIs and KV layouts change between vLLM's minor versions.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_adapter.base import EngineAdapterError
from engine_adapter.connector_orders import Orders
from engine_adapter.connector_scheduler import SchedulerHalf
from engine_adapter.connector_worker import WorkerHalf
from engine_adapter.device import PagedKV, UnsupportedLayoutError
from engine_adapter.loaded_adapters import LoadedAdapters
from engine_adapter.weights import WeightsError, weights_digest
from prefix_store.base import Namespace
from prefix_store.hashing import digest
from prefix_store.link import StoreLink
from prefix_store.record import RecordShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.headstart")

TESTED_VLLM = ("0.32.",)
FIRST_TRY_S = 2.0

IDLE_WAIT_S = 0.005
"""An engine whose requests all wait for loads asks for them without a pause, and takes the
processor from those that copy. A request that comes meanwhile waits so long at most."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The orders of one step, in the form that vLLM carries from scheduler to worker."""

    orders: Orders


@dataclass
class WorkerIdentity(KVConnectorHandshakeMetadata):
    """What a worker knows once its KV cache exists, carried to the scheduler at the start."""

    namespace: Namespace
    shape: RecordShape


class HeadstartConnector(KVConnectorBase_V1):
    """Loads stored blocks before prefill and saves new blocks after it."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_supported(vllm_config, kv_cache_config)
        _log_like_vllm()
        config = self._kv_transfer_config
        socket = config.get_from_extra_config("headstart.store_socket", None)
        if not socket:
            raise EngineAdapterError(
                'kv_connector_extra_config needs "headstart.store_socket", the path of the '
                "store's socket; `headstart engine` sets it"
            )
        engine = str(config.get_from_extra_config("headstart.engine_id", "engine"))
        name = f"{engine}/{role.name.lower()}"
        self._block_size: int = vllm_config.cache_config.block_size
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._link: StoreLink | None = None
        self._identity: WorkerIdentity | None = None
        self._failed_block_ids: set[int] = set()
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerHalf(Path(socket), name)
        else:
            self._link = StoreLink(Path(socket), name)
            self._link.wait_first_try(FIRST_TRY_S)
            model = str(config.get_from_extra_config("headstart.model", ""))
            lora = vllm_config.lora_config
            adapters = LoadedAdapters(time.time_ns(), str(lora.lora_dtype) if lora else "")
            self._scheduler = SchedulerHalf(self._link, self._block_size, adapters, model=model)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is a miss later, nothing else."""
        return False

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            kv, shape = self._in_worker().register(
                kv_caches, self._kv_cache_config.num_blocks, self._block_size
            )
            namespace = self._namespace(kv)
        except (UnsupportedLayoutError, WeightsError) as error:
            logger.error("Headstart stores nothing for this engine: %s", error)
        except Exception:
            # An engine without a store is better than none.
            logger.exception("Headstart stores nothing for this engine: its KV cache is unknown")
        else:
            self._identity = WorkerIdentity(namespace, shape)
            logger.info(
                "Headstart: blocks of %d tokens, %d bytes; weights %s, layout %s",
                shape.num_tokens, shape.payload_bytes, namespace.weights, namespace.kv_layout,
            )  # fmt: skip

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._identity

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Here and not where loads start: vLLM starts them when the step has been computed.
        self._in_worker().begin(self._orders().work)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._in_worker().start_loads(self._orders().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        return

    def wait_for_save(self) -> None:
        self._in_worker().end()
        self._in_worker().save(self._orders().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        patience_s = IDLE_WAIT_S if self._orders().is_idle else 0.0
        results = self._in_worker().take_results(patience_s)
        for result in results:
            self._failed_block_ids.update(result.failed_block_ids)
        return KVConnectorTransferResults(
            finished_recving={result.request_id for result in results}
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    # --- scheduler ---

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        identity = metadata.get(0)
        if isinstance(identity, WorkerIdentity):
            self._in_scheduler().introduce(identity.namespace, identity.shape)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        try:
            num_tokens = self._in_scheduler().num_matched_tokens(request, num_computed_tokens)
        except Exception:
            logger.exception("a look-up failed; the prompt is computed")
            num_tokens = 0
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._in_scheduler().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        try:
            return StepMetadata(self._in_scheduler().orders(scheduler_output))
        except Exception:
            logger.exception("nothing is saved in this step")
            return StepMetadata(Orders(loads=self._in_scheduler().take_loads()))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._in_scheduler().loaded(
            connector_output.finished_recving or set(), connector_output.invalid_block_ids
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._in_scheduler().finished(request)
        return False, None

    def reset_cache(self) -> bool | None:
        return self._in_scheduler().clear_store()

    # --- both ---

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._link is not None:
            self._link.close()

    def _in_worker(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    def _in_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    def _orders(self) -> Orders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    def _namespace(self, kv: PagedKV) -> Namespace:
        config = self._vllm_config
        model, parallel = config.model_config, config.parallel_config
        return Namespace(
            weights=weights_digest(_model_dir(model.model, model.revision)),
            adapter="",
            dtype=str(model.dtype),
            computation=_computation(config, kv),
            kv_dtype=config.cache_config.cache_dtype,
            kv_layout=kv.layout,
            block_size=self._block_size,
            rank=parallel.rank,
            world_size=parallel.world_size,
        )


def _computation(config: VllmConfig, kv: PagedKV) -> str:
    """Digest of what changes KV values or their packing beyond weights, types and layout."""
    model = config.model_config
    return digest(
        vllm.__version__,
        str(model.quantization),
        # With all overrides applied, such as another rope scaling.
        model.hf_config.to_json_string(use_diff=False),
        str(config.attention_config),
        str(config.speculative_config.model if config.speculative_config else None),
        kv.hardware,
    ).hex()


def _log_like_vllm() -> None:
    """What our modules log goes where the engine's own lines go."""
    engine = logging.getLogger("vllm")
    for package in ("engine_adapter", "prefix_store"):
        ours = logging.getLogger(package)
        ours.handlers, ours.propagate = engine.handlers, False
        ours.setLevel(logging.INFO)


def _model_dir(model: str, revision: str | None) -> Path:
    """The directory with the weights of a local model or of one in the hub's local cache."""
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (only for hub names)

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{model}: its weights are not in the local cache: {error}") from error


def _check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    if not vllm.__version__.startswith(TESTED_VLLM) and not os.environ.get(
        "HEADSTART_ALLOW_UNTESTED_VLLM"
    ):
        raise EngineAdapterError(
            f"vLLM {vllm.__version__} was not tested with Headstart's connector (tested: "
            f"{', '.join(v + 'x' for v in TESTED_VLLM)}); install a tested version, or set "
            "HEADSTART_ALLOW_UNTESTED_VLLM=1 and check its output"
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise EngineAdapterError(
            f"engines of {parallel.world_size} ranks cannot use the store yet; run one rank for "
            "each replica, or set `store: null`"
        )
    groups = kv_cache_config.kv_cache_groups
    # Subclasses may drop blocks in the middle of a prompt.
    kept = [type(group.kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec) for group in groups]
    if kept != [True]:
        raise EngineAdapterError(
            "only models whose layers all attend to the whole prompt can use the store yet (not "
            "those with sliding windows, chunked attention or state spaces); set `store: null`"
        )

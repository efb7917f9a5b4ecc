"""A weight transfer backend for vLLM on processors, so that transfers can be tested without GPUs.

Steps and metadata are those of vLLM's NCCL backend; the tensors are broadcast over gloo. vLLM's processes find the
backend by the entry point in the folder `gloo_plugin`, which must be on their PYTHONPATH.

Guarantees: the process group is only used for transfers, the workers' own group is untouched; when one side fails, the
other fails too, instead of waiting.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Lock, Thread
from typing import Any, ClassVar, Self
from uuid import uuid4

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, Store, Work
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

TRAINER_RANK = 0
RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
"""Longer than a replica waits (`policy.transfer.rendezvous_timeout_s`), as in vLLM's own backends."""
TENSOR_TIMEOUT = timedelta(seconds=300)
"""Per tensor: a trainer may gather one from many processes."""
POLL_S = 0.001
ALL_HAVE_ARRIVED = "all-have-arrived"
STARTING_OR_CLOSING = Lock()
"""Else who starts a broadcast could have the last reference to its group, and would wait there as in `close`."""
NOT_CONNECTED = "Trainer and engines are not connected (any more): begin with trainer_init."


def register() -> None:
    """Makes `backend: gloo` known to vLLM in this process; may be called more than once."""
    if "gloo" not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - vLLM says nowhere else what is registered
        WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
        WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerWeightTransferEngine)


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """Where a worker meets the trainer; `rank_offset` is the rank of its engine's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    rendezvous_id: str
    """Different each time: a worker that is late for an earlier rendezvous must not join this one."""


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, NCCLWeightTransferUpdateInfo]):
    """The worker's side: receives tensors in checkpoint format and loads each when it has arrived."""

    init_info_cls = GlooInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    group: ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Raises `RuntimeError` if not all processes arrive in time."""
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = rendezvous_store(init_info, is_master=False)
        store.set(arrival_key(rank), "")
        store.wait([ALL_HAVE_ARRIVED], RENDEZVOUS_TIMEOUT)
        self.group = ProcessGroupGloo(store, rank, init_info.world_size, TENSOR_TIMEOUT)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator afterwards, and fails where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Raises `RuntimeError` if the trainer is gone, and what the model raises for weights that do not fit."""
        model: Any = self.model
        model.load_weights(self._received(update_info))

    def _received(self, update_info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        declared = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype_name, shape in declared:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name), device="cpu")
            self._receive(tensor)
            yield name, tensor

    def _receive(self, tensor: torch.Tensor) -> None:
        """Raises `RuntimeError` if the trainer is gone, or `shutdown` is called meanwhile."""
        receiving = broadcast(self, tensor)
        try:
            while not receiving.is_completed():
                if self.group is None:
                    raise RuntimeError(NOT_CONNECTED)
                time.sleep(POLL_S)
            receiving.wait()
        finally:
            # Connections close with the last reference; a traceback would keep this one.
            del receiving

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]

    def shutdown(self) -> None:
        """May be called from another thread: what is being received fails."""
        close(self)


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Where the trainer (`rank` 0) listens; `world_size` counts it and every worker."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side, of a trainer with one process."""

    init_info_cls = GlooTrainerInitInfo
    source: WeightSource
    group: ProcessGroupGloo | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Raises what `client` raises, without waiting for the rendezvous, and `ValueError` without a source."""
        if source is None:
            raise ValueError("The weights to send come from a WeightSource: give one as source.")
        engine = cls(client=client, source=source, is_sender=True)
        engine._connect(init_info)
        return engine

    def _connect(self, init_info: GlooTrainerInitInfo) -> None:
        for_workers = GlooInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=TRAINER_RANK + 1,
            world_size=init_info.world_size,
            rendezvous_id=uuid4().hex,
        )
        store = rendezvous_store(for_workers, is_master=True)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(self.client.init_weight_transfer_engine, asdict(for_workers))
            workers = [arrival_key(rank) for rank in range(1, init_info.world_size)]
            wait_while_running(connecting, lambda: store.check(workers))
            store.set(ALL_HAVE_ARRIVED, "")
            self.group = ProcessGroupGloo(store, TRAINER_RANK, init_info.world_size, TENSOR_TIMEOUT)
            connecting.result()

    def send_weights(self) -> None:
        """Sends all weights of the source, once.

        Raises:
            Exception: what `client` or the source raises, or `RuntimeError` if an engine is gone; afterwards the
                trainer has to begin with `trainer_init` again.
        """
        metadata = self.source.metadata()
        if self.group is None:
            raise RuntimeError(NOT_CONNECTED)
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(self.client.update_weights, asdict(update_info_of(metadata)))
            try:
                for _, tensor in self.source:
                    self.send(tensor, receiving)
            except BaseException as broken:
                self.shutdown()
                if isinstance(broken, RuntimeError):
                    # The connection broke: the engines' side knows why.
                    receiving.result()
                raise
            receiving.result()
        self.client.finish_weight_update()

    def send(self, tensor: torch.Tensor, receiving: "Future[None]") -> None:
        sending = broadcast(self, tensor.detach().cpu().contiguous())
        try:
            wait_while_running(receiving, sending.is_completed)
            sending.wait()
        finally:
            # Connections close with the last reference; a traceback would keep this one.
            del sending

    def shutdown(self) -> None:
        """Closes the connections: engines that wait for a tensor fail."""
        close(self)


def close(engine: "GlooWeightTransferEngine | GlooTrainerWeightTransferEngine") -> None:
    """Closes the connections. In a thread, because gloo first waits until the current broadcast ends or times out."""
    with STARTING_OR_CLOSING:
        last_reference, engine.group = [engine.group], None
    Thread(target=last_reference.clear, daemon=True).start()


def rendezvous_store(init_info: GlooInitInfo, is_master: bool) -> Store:
    address, port = init_info.master_address, init_info.master_port
    store = TCPStore(address, port, is_master=is_master, timeout=RENDEZVOUS_TIMEOUT, wait_for_workers=False)
    return PrefixStore(init_info.rendezvous_id, store)


def arrival_key(rank: int) -> str:
    return f"rank-{rank}-has-arrived"


def update_info_of(metadata: list[ParamMeta]) -> NCCLWeightTransferUpdateInfo:
    return NCCLWeightTransferUpdateInfo(
        names=[parameter.name for parameter in metadata],
        dtype_names=[str(parameter.dtype).removeprefix("torch.") for parameter in metadata],
        shapes=[list(parameter.shape) for parameter in metadata],
    )


def wait_while_running(call: "Future[None]", is_done: Callable[[], bool]) -> None:
    """Waits until `is_done` or until `call`, in which the engines take part, has ended; raises what `call` raised."""
    while not call.done() and not is_done():
        time.sleep(POLL_S)
    if call.done():
        call.result()


def broadcast(engine: Any, tensor: torch.Tensor) -> Work:
    """Sends `tensor` from the trainer to all others, or receives into it; as bytes, because gloo knows few dtypes."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = TRAINER_RANK, 0, True
    with STARTING_OR_CLOSING:
        if engine.group is None:
            raise RuntimeError(NOT_CONNECTED)
        work: Work = engine.group.broadcast([tensor.reshape(-1).view(torch.uint8)], options)
    return work

"""A weight transfer backend for vLLM on processors, so that transfers can be tested without GPUs.

Steps and metadata are those of vLLM's NCCL backend; the tensors are broadcast over gloo. vLLM's processes find the
backend by the entry point in the folder `gloo_plugin`, which must be on their PYTHONPATH.

Guarantees: the process group is only used for transfers, the workers' own group is untouched; when one side fails, the
other fails too, instead of waiting.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions, Store, Work
from vllm.distributed.weight_transfer.base import ParamMeta, WeightTransferEngine, WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
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
NOT_CONNECTED = "Trainer and engines are not connected (any more)."


def register() -> None:
    """Makes `backend: gloo` known to vLLM in this process; may be called more than once."""
    if "gloo" not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - vLLM says nowhere else what is registered
        WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """Where a worker meets the trainer; `rank_offset` is the rank of its engine's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False
    """Clients of NCCL say it; each tensor comes alone."""


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, NCCLWeightTransferUpdateInfo]):
    """The worker's side: receives tensors in checkpoint format and loads each when it has arrived."""

    init_info_cls = GlooInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    group: ProcessGroupGloo | None = None
    packed = False

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


class GlooEndpoint:
    """The trainer's side, in NCCL's place: opened and used beside the calls of a client of vLLM's control routes."""

    def __init__(self, init_info: Mapping[str, Any], calling: "Future[None] | None" = None) -> None:
        """Waits until all workers are there.

        Raises:
            Exception: what `calling`, which tells them to come, has raised; `TimeoutError` after a minute.
        """
        where = GlooInitInfo(**{**init_info, "rank_offset": TRAINER_RANK + 1})
        store = rendezvous_store(where, is_master=True)
        workers = [arrival_key(rank) for rank in range(1, where.world_size)]
        wait_while_running(calling, lambda: store.check(workers), RENDEZVOUS_TIMEOUT)
        store.set(ALL_HAVE_ARRIVED, "")
        self.group: ProcessGroupGloo | None = ProcessGroupGloo(store, TRAINER_RANK, where.world_size, TENSOR_TIMEOUT)

    def send(self, named: Iterable[tuple[str, torch.Tensor]], receiving: "Future[None] | None" = None) -> None:
        """Raises what `receiving`, the call in which the workers receive, has raised."""
        for _, tensor in named:
            sending = broadcast(self, tensor.detach().cpu().contiguous())
            try:
                wait_while_running(receiving, sending.is_completed, TENSOR_TIMEOUT)
                sending.wait()
            finally:
                # Connections close with the last reference; a traceback would keep this one.
                del sending


def close(engine: GlooWeightTransferEngine) -> None:
    """Closes the connections. In a thread, because gloo first waits until the current broadcast ends or times out."""
    with STARTING_OR_CLOSING:
        last_reference, engine.group = [engine.group], None
    Thread(target=last_reference.clear, daemon=True).start()


def rendezvous_store(init_info: GlooInitInfo, is_master: bool) -> Store:
    address, port = init_info.master_address, init_info.master_port
    return TCPStore(address, port, is_master=is_master, timeout=RENDEZVOUS_TIMEOUT, wait_for_workers=False)


def arrival_key(rank: int) -> str:
    return f"rank-{rank}-has-arrived"


def update_info_of(metadata: list[ParamMeta]) -> NCCLWeightTransferUpdateInfo:
    return NCCLWeightTransferUpdateInfo(
        names=[parameter.name for parameter in metadata],
        dtype_names=[str(parameter.dtype).removeprefix("torch.") for parameter in metadata],
        shapes=[list(parameter.shape) for parameter in metadata],
    )


def wait_while_running(call: "Future[None] | None", is_done: Callable[[], bool], within: timedelta) -> None:
    """Waits until `is_done` or until `call`, in which the engines take part, has ended.

    Raises:
        Exception: what `call` has raised.
        TimeoutError: neither was so in time.
    """
    end = time.monotonic() + within.total_seconds()
    while not (call is not None and call.done()) and not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"the engines did not take part within {within}")
        time.sleep(POLL_S)
    if call is not None and call.done():
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

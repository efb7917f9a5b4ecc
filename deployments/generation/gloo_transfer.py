"""Weight transfer between processors: the steps and the metadata of vLLM's NCCL engine, the tensors over gloo.

Guarantees: the process group is the transfer's alone, the workers' own is not touched; where one side fails the other
fails too, instead of waiting.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Thread
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
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

TRAINER_RANK = 0
MEET_WITHIN = timedelta(seconds=60)
"""A worker serves nothing while it waits for the others."""
RECEIVE_WITHIN = timedelta(seconds=300)
"""Per tensor: a trainer that gathers one from many processes takes its time."""
POLL_S = 0.001
ALL_ARE_HERE = "all-are-here"
NOT_MET = "Trainer and engines are not connected, or not any more: begin with trainer_init."


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker is told of the rendezvous; `rank_offset` is the rank of its engine's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    meeting: str
    """Different each time: a worker that is late for an earlier meeting must not be taken for one of this."""


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, NCCLWeightTransferUpdateInfo]):
    """The worker's side: receives tensors in checkpoint format and loads each as it comes."""

    init_info_cls = GlooInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    _group: ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Raises `RuntimeError` when not all have met in time."""
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = meeting_place(init_info, is_master=False)
        store.set(here(rank), "")
        store.wait([ALL_ARE_HERE], MEET_WITHIN)
        self._group = ProcessGroupGloo(store, rank, init_info.world_size, RECEIVE_WITHIN)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator afterwards, and fails where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Raises `RuntimeError` when the trainer has gone away, and what the model has against the weights."""
        model: Any = self.model
        model.load_weights(self._received(update_info))

    def _received(self, update_info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        declared = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype_name, shape in declared:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name), device="cpu")
            from_trainer(self._group, tensor).wait()
            yield name, tensor

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]

    def shutdown(self) -> None:
        self._group = None


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Where the trainer's first process (`rank` 0) listens, and how many take part: it and every worker."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side; of its processes only the first one sends, the others replay the source beside it."""

    init_info_cls = GlooTrainerInitInfo
    source: WeightSource
    _group: ProcessGroupGloo | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Raises what `client` raises, as soon as it does, and `ValueError` without a source."""
        if source is None:
            raise ValueError("The weights to send come from a WeightSource: give one as source.")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._meet(init_info)
        return engine

    def _meet(self, init_info: GlooTrainerInitInfo) -> None:
        for_workers = GlooInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=TRAINER_RANK + 1,
            world_size=init_info.world_size,
            meeting=uuid4().hex,
        )
        store = meeting_place(for_workers, is_master=True)
        with ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(self.client.init_weight_transfer_engine, asdict(for_workers))
            workers = [here(rank) for rank in range(1, init_info.world_size)]
            wait_beside(meeting, lambda: store.check(workers))
            store.set(ALL_ARE_HERE, "")
            self._group = ProcessGroupGloo(store, TRAINER_RANK, init_info.world_size, RECEIVE_WITHIN)
            meeting.result()

    def send_weights(self) -> None:
        """One whole update.

        Raises:
            Exception: what `client` or the source raises, or `RuntimeError` when an engine has gone away; the trainer
                then has to meet the engines again.
        """
        metadata = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        if self._group is None:
            raise RuntimeError(NOT_MET)
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(self.client.update_weights, asdict(update_info_of(metadata)))
            try:
                for tensor in as_declared(self.source, metadata):
                    self._send(tensor, receiving)
            except BaseException as broken:
                self.shutdown()
                if isinstance(broken, RuntimeError):
                    # The connection broke: the other side knows why.
                    receiving.result()
                raise
            receiving.result()
        self.client.finish_weight_update()

    def _send(self, tensor: torch.Tensor, receiving: "Future[None]") -> None:
        sending = from_trainer(self._group, tensor.detach().cpu().contiguous())
        try:
            wait_beside(receiving, sending.is_completed)
            sending.wait()
        finally:
            # Connections are closed with the last reference, and a traceback would keep this one.
            del sending

    def shutdown(self) -> None:
        """Closes the connections: engines that wait for more fail."""
        group, self._group = [self._group], None
        # Beside the caller, because gloo first lets what is being sent come to its end or its timeout.
        Thread(target=group.clear, daemon=True).start()


def meeting_place(init_info: GlooInitInfo, is_master: bool) -> Store:
    address, port = init_info.master_address, init_info.master_port
    store = TCPStore(address, port, is_master=is_master, timeout=MEET_WITHIN, wait_for_workers=False)
    return PrefixStore(init_info.meeting, store)


def here(rank: int) -> str:
    return f"rank-{rank}-is-here"


def update_info_of(metadata: list[ParamMeta]) -> NCCLWeightTransferUpdateInfo:
    return NCCLWeightTransferUpdateInfo(
        names=[parameter.name for parameter in metadata],
        dtype_names=[str(parameter.dtype).removeprefix("torch.") for parameter in metadata],
        shapes=[list(parameter.shape) for parameter in metadata],
    )


def as_declared(source: WeightSource, metadata: list[ParamMeta]) -> Iterator[torch.Tensor]:
    """Raises `ValueError` where the source gives another tensor than it said: the engines expect what it said."""
    for declared, (name, tensor) in zip(metadata, source, strict=True):
        given = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
        if given != declared:
            raise ValueError(f"The source declared {declared} and gives {given}.")
        yield tensor


def wait_beside(call: "Future[None]", is_done: Callable[[], bool]) -> None:
    """Until `is_done`, or `call` has ended, in which the engines take part; raises what it raised."""
    while not call.done() and not is_done():
        time.sleep(POLL_S)
    if call.done():
        call.result()


def from_trainer(group: Any, tensor: torch.Tensor) -> Work:
    """Brings `tensor` from the trainer to all others, as bytes, because gloo knows few dtypes."""
    if group is None:
        raise RuntimeError(NOT_MET)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = TRAINER_RANK, 0, True
    work: Work = group.broadcast([tensor.reshape(-1).view(torch.uint8)], options)
    return work

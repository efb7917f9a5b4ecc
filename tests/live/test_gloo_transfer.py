"""Both sides of the transfer over gloo, in one process: what arrives, and that nobody waits for one that failed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ModuleSource

from deployments.generation.gloo_transfer import (
    GlooTrainerInitInfo,
    GlooTrainerWeightTransferEngine,
    GlooWeightTransferEngine,
)
from service.startup.ports import free_port


class Model(nn.Module):
    """Tensors of several dtypes and shapes, one of them without dimensions and one not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(300, 400, generator=generator).bfloat16())
        self.turned = nn.Parameter(torch.randn(7, 5, generator=generator).T)
        self.scale = nn.Parameter(torch.tensor(3.5, dtype=torch.float64))


class OneWorker:
    """vLLM's `ParallelConfig` of an engine with one worker."""

    data_parallel_index = 0
    world_size = 1
    rank = 0


class Receiver:
    """The model of an engine; it cannot take the tensor that is named."""

    def __init__(self, refuses: str | None) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._refuses = refuses

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self._refuses:
                raise KeyError(name)
            self.weights[name] = tensor


def engine_of(model: Receiver) -> GlooWeightTransferEngine:
    parallel_config: Any = OneWorker()
    engine = object.__new__(GlooWeightTransferEngine)
    engine.parallel_config = parallel_config
    engine.model = model  # type: ignore[assignment]
    return engine


class Engines:
    """Two engines behind vLLM's `VLLMWeightSyncClient` protocol; one that fails is gone, as a replica would be."""

    def __init__(self, refuses: str | None = None, is_closed: bool = False) -> None:
        self.models = [Receiver(refuses), Receiver(None)]
        self.calls: list[str] = []
        self._engines = [engine_of(model) for model in self.models]
        self._is_closed = is_closed

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self._is_closed:
            raise ValueError("no replica is there")
        with ThreadPoolExecutor(2) as threads:
            for rank, engine in enumerate(self._engines, start=1):
                info = engine.parse_init_info({**init_info, "rank_offset": rank})
                threads.submit(engine.init_transfer_engine, info)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        with ThreadPoolExecutor(2) as threads:
            received = [threads.submit(self._receive, engine, update_info) for engine in self._engines]
        for each in received:
            each.result()

    def _receive(self, engine: GlooWeightTransferEngine, update_info: Any) -> None:
        try:
            engine.update_weights(update_info)
        except Exception:
            engine.shutdown()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


def connected(engines: Engines, source: ModuleSource, rank: int = 0) -> GlooTrainerWeightTransferEngine:
    return GlooTrainerWeightTransferEngine.trainer_init(
        GlooTrainerInitInfo("127.0.0.1", free_port(), 3, rank=rank), client=engines, source=source
    )


def test_every_engine_receives_every_tensor_bit_for_bit_as_often_as_it_is_sent() -> None:
    model, engines = Model(), Engines()
    trainer = connected(engines, ModuleSource(model))
    for _ in range(2):
        trainer.send_weights()
        for receiver in engines.models:
            assert list(receiver.weights) == ["matrix", "turned", "scale"]
            for name, parameter in model.named_parameters():
                assert receiver.weights[name].dtype == parameter.dtype
                assert torch.equal(receiver.weights[name], parameter)
        with torch.no_grad():
            model.turned.add_(1.0)
    assert engines.calls == ["start", "update", "finish"] * 2


def test_a_refusal_to_meet_reaches_the_trainer() -> None:
    with pytest.raises(ValueError, match="no replica is there"):
        connected(Engines(is_closed=True), ModuleSource(Model()))


def test_an_engine_that_cannot_take_a_tensor_ends_it_for_all() -> None:
    engines = Engines(refuses="turned")
    trainer = connected(engines, ModuleSource(Model()))
    with pytest.raises(KeyError, match="turned"):
        trainer.send_weights()
    assert engines.calls == ["start", "update"]
    with pytest.raises(RuntimeError, match="begin with trainer_init"):
        trainer.send_weights()


def test_a_source_that_gives_another_tensor_than_it_declared_ends_it_for_all() -> None:
    class Fickle(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(super().__iter__())[:1]
            yield "turned", torch.zeros(3)

    engines = Engines()
    trainer = connected(engines, Fickle(Model()))
    with pytest.raises(ValueError, match=r"declared .*'turned'.*shape=\(5, 7\).* and gives .*shape=\(3,\)"):
        trainer.send_weights()
    assert engines.calls == ["start", "update"]
    assert all("turned" not in receiver.weights for receiver in engines.models)


def test_trainer_processes_that_do_not_send_only_replay_the_source() -> None:
    replayed: list[str] = []

    class Sharded(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                replayed.append(name)
                yield name, tensor

    engines = Engines()
    connected(engines, Sharded(Model()), rank=1).send_weights()
    assert (replayed, engines.calls) == (["matrix", "turned", "scale"], [])

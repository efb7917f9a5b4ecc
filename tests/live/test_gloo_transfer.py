"""Both sides of a transfer over gloo, in one process: the tensors arrive, and no side waits for one that failed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ModuleSource

from service.startup.config import free_port
from tests.live.gloo_transfer import (
    GlooTrainerInitInfo,
    GlooTrainerWeightTransferEngine,
    GlooWeightTransferEngine,
    update_info_of,
)


class Model(nn.Module):
    """Tensors of several dtypes and shapes; one has no dimensions and one is not contiguous."""

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
    """The model of an engine; raises for the tensor named `refuses`."""

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
    """Two engines behind vLLM's `VLLMWeightSyncClient` protocol; one that fails closes its connections."""

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


def test_every_engine_receives_every_tensor_bit_for_bit_in_each_update() -> None:
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


def test_an_error_of_the_client_during_the_rendezvous_reaches_the_trainer() -> None:
    with pytest.raises(ValueError, match="no replica is there"):
        connected(Engines(is_closed=True), ModuleSource(Model()))


def test_an_engine_that_cannot_load_a_tensor_ends_the_transfer_for_all() -> None:
    engines = Engines(refuses="turned")
    trainer = connected(engines, ModuleSource(Model()))
    with pytest.raises(KeyError, match="turned"):
        trainer.send_weights()
    assert engines.calls == ["start", "update"]
    with pytest.raises(RuntimeError, match="begin with trainer_init"):
        trainer.send_weights()


def test_an_engine_that_is_shut_down_while_it_waits_for_a_tensor_fails() -> None:
    engines = Engines()
    trainer = connected(engines, ModuleSource(Model()))
    info = asdict(update_info_of(ModuleSource(Model()).metadata()))
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(engines._engines[0].update_weights, info)
        engines._engines[0].shutdown()
        with pytest.raises(RuntimeError, match="not connected"):
            receiving.result()
    trainer.shutdown()


def test_a_source_whose_tensor_differs_from_its_metadata_ends_the_transfer_for_all() -> None:
    class Inconsistent(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(super().__iter__())[:1]
            yield "turned", torch.zeros(3)

    engines = Engines()
    trainer = connected(engines, Inconsistent(Model()))
    with pytest.raises(ValueError, match=r"declared .*'turned'.*shape=\(5, 7\).* and gives .*shape=\(3,\)"):
        trainer.send_weights()
    assert engines.calls == ["start", "update"]
    assert all("turned" not in receiver.weights for receiver in engines.models)


def test_trainer_processes_other_than_the_first_iterate_over_the_source_and_send_nothing() -> None:
    iterated: list[str] = []

    class Sharded(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                iterated.append(name)
                yield name, tensor

    engines = Engines()
    connected(engines, Sharded(Model()), rank=1).send_weights()
    assert (iterated, engines.calls) == (["matrix", "turned", "scale"], [])

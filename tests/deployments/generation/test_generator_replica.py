"""How a generator replica starts its engine, and how it ends when it broke. All else needs an engine: `tests/live`."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import ReplicaShuttingDown, RolloutFailure
from deployments.generation import generator_replica
from deployments.generation.engine import VLLMEngine
from deployments.generation.generator_replica import GeneratorReplica
from deployments.generation.generator_replica_base import GeneratorReplicaBase
from deployments.generation.settings import EngineSettings, ResponseSettings
from deployments.protocols.generation import GenerationRequest
from tests import virtual_time
from tests.deployments.generation.test_generator_replica_base import ScriptedEngine, requests
from tests.virtual_time import runs

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


class EngineArguments(Exception):
    """Carries what the engine would have been started with."""


@pytest.mark.parametrize(
    ("configured", "replica_id", "seed"),
    [(None, "a", 111606993), (0, "a", 120256410), (7, "a", 2679081301), (7, "b", 3374731680)],
)
@runs
async def test_an_engine_starts_with_its_replicas_seed_and_parser(
    configured: int | None, replica_id: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(engine_args: dict[str, Any], *_: Any) -> None:
        raise EngineArguments(engine_args)

    monkeypatch.setattr(VLLMEngine, "start", start)
    monkeypatch.setattr(generator_replica, "replica_id", lambda: replica_id)
    monkeypatch.setattr("deployments.logs.configure", lambda **_options: None)
    settings = EngineSettings(model="m", device="cpu", seed=configured)
    replica: Any = GeneratorReplica.__new__(GeneratorReplica)
    with pytest.raises(EngineArguments) as raised:
        await replica.__init__(settings, None, ResponseSettings(reasoning_parser="qwen3"))
    assert (raised.value.args[0]["reasoning_parser"], raised.value.args[0]["seed"]) == ("qwen3", seed)


class PausedEngine(ScriptedEngine):
    """It generates nothing until it is interrupted."""

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        await super().interrupt(generation_ids, failure)
        self.finish(*generation_ids)

    def shutdown(self) -> None:
        """There is no process."""


class BrokenReplica(GeneratorReplica):
    """Broke while its weights changed; the store that would have to take its report is gone."""

    def __init__(self, engine: Any) -> None:
        GeneratorReplicaBase.__init__(self, engine)
        broken: Any = SimpleNamespace(broken=None)
        self._commands = broken
        self._running_commands = asyncio.get_running_loop().create_future()  # type: ignore[assignment]

    def refuse_other_weights(self, request: GenerationRequest) -> None:
        """It has not broken when its generation begins."""

    def load(self) -> Any:
        return None

    def end(self) -> None:
        self._commands.broken = "WeightsFailed: half of them"


async def test_a_broken_replica_is_unhealthy_and_keeps_no_generation() -> None:
    engine = PausedEngine()
    replica: Any = BrokenReplica(engine)
    generating = asyncio.ensure_future(anext(replica.generate(requests("g"))))
    await virtual_time.settled()
    replica.end()
    with pytest.raises(RuntimeError, match="half of them"):
        await replica.check_health()
    replica.drain(300.0)
    await generating
    [(names, failure)] = engine.interrupted
    assert (names, type(failure), virtual_time.now()) == (["g"], ReplicaShuttingDown, 0.0)

"""How a generator replica starts its engine, and how it ends when it broke. All else needs an engine: `tests/live`."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import ReplicaShuttingDown
from deployments.generation import generator_replica
from deployments.generation.engine import VLLMEngine
from deployments.generation.generator_replica import GeneratorReplica, _replica_seed
from deployments.generation.health import OutputHealth
from deployments.generation.settings import EngineSettings, ResponseSettings

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


class EngineArguments(Exception):
    """Carries what the engine would have been started with."""


@pytest.mark.parametrize("configured", [None, 7])
def test_an_engine_starts_with_a_seed_of_its_own_replica_and_the_parser_of_reasoning(
    configured: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(engine_args: dict[str, Any], *_: Any) -> None:
        raise EngineArguments(engine_args)

    monkeypatch.setattr(VLLMEngine, "start", start)
    monkeypatch.setattr(generator_replica, "replica_id", lambda: "x1y2z3")
    monkeypatch.setattr("deployments.logs.configure", lambda **_options: None)
    settings = EngineSettings(model="m", device="cpu", seed=configured)
    replica: Any = GeneratorReplica.__new__(GeneratorReplica)
    with pytest.raises(EngineArguments) as raised:
        asyncio.run(replica.__init__(settings, None, ResponseSettings(reasoning_parser="qwen3")))
    assert raised.value.args[0]["reasoning_parser"] == "qwen3"
    assert raised.value.args[0]["seed"] == _replica_seed(configured, "x1y2z3")


def test_a_broken_replica_is_unhealthy_at_once_and_keeps_no_generation_until_its_end() -> None:
    """The store that would have to take its report is gone, and its engine is paused."""

    async def run() -> None:
        replica: Any = GeneratorReplica.__new__(GeneratorReplica)
        replica._output_health = OutputHealth()
        replica._commands = SimpleNamespace(broken="WeightsFailed: half of them")
        replica._running_commands = asyncio.get_running_loop().create_future()
        with pytest.raises(RuntimeError, match="half of them"):
            await replica.check_health()

        interrupted = asyncio.Event()

        async def interrupt(generation_ids: list[str], failure: Exception) -> None:
            assert (generation_ids, type(failure)) == (["g"], ReplicaShuttingDown)
            replica._running.clear()
            interrupted.set()

        replica._engine = SimpleNamespace(interrupt=interrupt, shutdown=lambda: None)
        replica._running = {"g": None}
        replica.drain(300.0)
        async with asyncio.timeout(2):
            await interrupted.wait()

    asyncio.run(run())

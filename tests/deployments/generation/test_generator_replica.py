"""How a generator replica starts its engine. Everything else of it needs an engine: `tests/live`."""

import asyncio
from typing import Any

import pytest

from deployments.generation import generator_replica
from deployments.generation.engine import VLLMEngine
from deployments.generation.generator_replica import GeneratorReplica
from deployments.generation.settings import EngineSettings, ResponseSettings
from deployments.seeds import replica_seed

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
    assert raised.value.args[0]["seed"] == replica_seed(configured, "x1y2z3")

"""Which generations of an engine run, and how they are interrupted."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import ReplicaShuttingDown
from deployments.generation.engine_outputs import RunningGenerations
from deployments.protocols.generation import GenerationRequest, SamplingOptions

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, [1], 1, (), SamplingOptions())


def test_generations_are_interrupted_by_their_ids_while_they_run() -> None:
    aborted: list[list[str]] = []

    async def abort(engine_ids: list[str]) -> None:
        aborted.append(sorted(engine_ids))

    llm: Any = SimpleNamespace(abort=abort)
    generations = RunningGenerations(llm)

    async def interrupt() -> None:
        failure = ReplicaShuttingDown("it ends")
        with generations.running(request("a")) as first, generations.running(request("b")) as other:
            with generations.running(request("a")) as retry:
                assert len({first.engine_id, retry.engine_id, other.engine_id}) == len(generations) == 3
                await generations.interrupt(["a", "unknown"], failure)
            assert [one.interrupted.is_set() for one in (first, retry, other)] == [True, True, False]
            assert (first.failure, other.failure) == (failure, None)
            await generations.interrupt(["a", "b"])
        await generations.interrupt(["a", "b"])
        assert aborted == [sorted([first.engine_id, retry.engine_id]), sorted([first.engine_id, other.engine_id])]

    asyncio.run(interrupt())
    assert len(generations) == 0

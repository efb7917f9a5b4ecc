"""When the service is ready, and what it says of parts that do not answer."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from deployments.failures import EnvironmentLost, GenerationLost, RolloutFailure
from deployments.protocols.environments import TaskDescription
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.info import DegradedPart
from service.rollout_requests.service_status import Readiness, StorePart
from tests import virtual_time
from tests.service.scripted import DESCRIPTION, ScriptedEnvironment, ScriptedGenerator

NEVER_S = 600.0


class Replicas:
    """Replicas by name: how long each takes to answer, or what it raises. Without names, one that is not known."""

    def __init__(self, **replicas: float | Exception) -> None:
        self._replicas = replicas
        self.asked = 0

    def replicas(self) -> Sequence[str]:
        return [name for name in self._replicas if name != "any"]

    async def answer(self, replica: str) -> None:
        self.asked += 1
        answer = self._replicas[replica]
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(answer)


class Generators(Replicas, ScriptedGenerator):
    async def describe(self) -> GeneratorDescription:
        await self.answer("any")
        return DESCRIPTION


class Environments(Replicas, ScriptedEnvironment):
    async def describe(self) -> TaskDescription:
        await self.answer("any")
        return TaskDescription("scripted", "", {})


class Store:
    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    async def answer(self) -> None:
        if self._failure is not None:
            raise self._failure


@virtual_time.synchronous
async def checked(
    generator: Generators, stores: Mapping[StorePart, Store] | None = None, **environments: Environments
) -> list[DegradedPart]:
    asked = {part: store.answer for part, store in (stores or {}).items()}
    return await Readiness(generator, environments, asked).check()


def test_a_service_all_of_whose_replicas_answer_is_not_degraded() -> None:
    assert checked(Generators(a=0, b=1), math=Environments(c=0), code=Environments(any=2)) == []


def test_a_slow_task_and_a_lost_replica_degrade_the_service_and_are_named() -> None:
    degraded = checked(
        Generators(a=GenerationLost("It died."), b=0),
        math=Environments(c=NEVER_S, d=0),
        code=Environments(e=NEVER_S),
        puzzle=Environments(any=KeyError("samples")),
        good=Environments(any=0),
    )
    slow = "The answer of the replica {} of the environment '{}' took longer than 5 s."
    assert [(part.part, part.task_name, part.replica_id, part.reason) for part in degraded] == [
        ("generator", None, "a", "It died."),
        ("environment", "math", "c", slow.format("c", "math")),
        ("environment", "code", "e", slow.format("e", "code")),
        ("environment", "puzzle", None, "The environment 'puzzle' cannot answer: KeyError."),
    ]


def test_a_store_that_does_not_answer_degrades_the_service_and_is_named() -> None:
    stores: dict[StorePart, Store] = {
        "data": Store(RolloutFailure("It died.")),
        "policy": Store(),
        "jobs": Store(KeyError("secret")),
    }
    assert checked(Generators(any=0), stores, math=Environments(any=0)) == [
        DegradedPart(part="data", reason="It died."),
        DegradedPart(part="jobs", reason="The deployment Jobs cannot answer: KeyError."),
    ]


def test_without_a_generator_replica_that_answers_the_service_is_not_ready() -> None:
    slow_then_lost = r"^The answer of the replica a of the generator took longer than 5 s\. It died\.$"
    with pytest.raises(RolloutFailure, match=slow_then_lost):
        checked(Generators(a=NEVER_S, b=GenerationLost("It died.")), math=Environments(any=0))


def test_without_a_task_that_answers_the_service_is_not_ready() -> None:
    lost = EnvironmentLost("It died.")
    with pytest.raises(RolloutFailure, match=r"^It died\. The answer of the environment 'b' took longer than 5 s\.$"):
        checked(Generators(any=0), a=Environments(c=lost), b=Environments(any=NEVER_S))


async def test_callers_of_the_same_moment_share_one_check() -> None:
    generator = Generators(a=1)
    readiness = Readiness(generator, {"math": Environments(any=0)}, {})

    await asyncio.gather(*(readiness.check() for _ in range(5)))
    assert generator.asked == 1
    await readiness.check()
    assert generator.asked == 2

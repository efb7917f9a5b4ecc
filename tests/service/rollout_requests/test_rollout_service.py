"""Whole requests on scripted ports, in virtual time."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from deployments.failures import GenerationRejected
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.generation import Generation, GenerationRequest, WeightSpan
from deployments.protocols.weight_versions import CurrentVersions
from rollout_client.contract.rollouts import PolicyVersions, RolloutRequest, SampleResult
from rollout_env import StepOutcome
from service.problems import RequestProblem
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.rollout_service import MOST_BYTES_PREPARED_INLINE, MOST_GENERATIONS_PREPARED_INLINE
from service.rollouts.episode import Episode
from service.settings import RequestLimits
from tests import virtual_time
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, outcome
from tests.service.scripted_http import ScriptedHttp

SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}


def request_of(*samples: dict[str, Any], **fields: Any) -> RolloutRequest:
    return RolloutRequest.model_validate({"samples": samples or [SAMPLE], **fields})


def at_version(version: int) -> CurrentVersions:
    """An answer of the store; the higher version is the later one."""
    return CurrentVersions("store", version, {"": version})


def slow_after_the_first(later_s: float) -> ScriptedGenerator:
    """Makes its first generation at once, and each other one in so many seconds."""
    generator = ScriptedGenerator(["A"])
    generator.delay_of = lambda _: later_s if len(generator.requests) > 1 else 0
    return generator


class Service(ScriptedHttp):
    """Its `rollouts` are asked without HTTP. The store answers nobody who waits before its gate is set."""

    def __init__(self, generator: ScriptedGenerator | None = None, math: ScriptedEnvironment | None = None) -> None:
        super().__init__(RequestLimits(), generator=generator)
        self.store.gate.clear()
        self.environments["math"] = math or ScriptedEnvironment([outcome(reward=1.0, terminated=True)])
        self.policy = self.rollouts.policy

    async def play(self, request: RolloutRequest, body_bytes: int = 0) -> dict[int, SampleResult]:
        """The results by position, in the order in which they were yielded."""
        async with aclosing(await self.rollouts.rollout(request, "request", body_bytes)) as results:
            return {position: result async for position, result in results}


@dataclass
class Starting(ScriptedEnvironment):
    """Starts its samples, except those that it refuses because they have a `fault`."""

    started: list[int | None] = field(default_factory=list)

    async def start(self, request: StepRequest) -> StepOutcome:
        self.started.append(request.sample)
        return StepOutcome([{"role": "user", "content": "Go."}], 0.0, False, metadata={"begun": True})

    async def describe(self) -> TaskDescription:
        return TaskDescription("math", "Starts.", fields={}, has_start=True)

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        return [RefusedField(place, ("fault",), "No.") for place, info in enumerate(extra_env_infos) if "fault" in info]


@pytest.mark.parametrize("body_bytes", [0, MOST_BYTES_PREPARED_INLINE + 1])
def test_samples_of_a_task_with_a_start_are_started_before_they_are_played(body_bytes: int) -> None:
    service = Service(math=Starting([outcome(terminated=True)]))
    results = virtual_time.run(service.play(request_of({"task_name": "math"}, SAMPLE), body_bytes))
    assert [message.content for message in results[0].message_log[:1]] == ["Go."]
    assert [message.content for message in results[1].message_log[:2]] == ["What is 1 + 2?", "Go."]
    assert [step.extra_env_info for step in service.environments["math"].requests] == [{"begun": True}] * 2


@pytest.mark.parametrize("sample", [{**SAMPLE, "extra_env_info": {"fault": 1}}, {**SAMPLE, "task_name": "chess"}])
def test_nothing_of_a_request_with_a_bad_sample_is_started(sample: dict[str, Any]) -> None:
    service = Service(math=(environment := Starting([outcome(terminated=True)])))
    with pytest.raises(RequestProblem):
        virtual_time.run(service.play(request_of(SAMPLE, sample)))
    assert (environment.started, service.has_started_something) == ([], False)


PASSES = {"groups": 2, "where": {"reward_mean": {"ge": 0}}}


def test_only_samples_that_are_drawn_are_started() -> None:
    environment = Starting([outcome(terminated=True)])
    results = virtual_time.run(Service(math=environment).play(request_of(*[SAMPLE] * 6, keep=PASSES)))
    assert [(position, result.idx) for position, result in results.items()] == [(0, 0), (1, 1)]
    assert environment.started == [0, 1]


@pytest.mark.parametrize(
    ("policy", "asked"),
    [({"max_staleness": 1}, (None, 0, None, None)), ({"min_version": 3, "wait_s": 7}, (None, 3, None, 7.0))],
)
async def test_a_request_waits_for_the_version_that_it_needs(policy: dict[str, int], asked: tuple[Any, ...]) -> None:
    service = Service()
    starting = asyncio.create_task(service.play(request_of(policy=policy)))
    await asyncio.sleep(5)
    assert (service.store.named("wait_for"), service.has_started_something) == ([asked], False)
    service.store.gate.set()
    assert (await starting)[0].status == "completed"
    assert service.policy.version == 3


async def test_rollouts_that_become_stale_are_cut_off_and_counted() -> None:
    class OfVersion3(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            generation = await super().generate(request)
            return replace(generation, weight_versions=(WeightSpan("3", 0, len(generation.token_ids)),))

    service = Service(generator=OfVersion3(["A" * 8], delay_s=8))
    service.policy.note(at_version(3))
    running = await service.rollouts.rollout(request_of(num_generations=3, policy={"max_staleness": 1}), "request", 0)
    for seconds, version in ((2, 4), (4, 5)):
        asyncio.get_running_loop().call_later(seconds, service.policy.note, at_version(version))
    results = [result async for _, result in running]
    assert virtual_time.now() == 4
    assert [(result.status, len(result.message_log[-1].token_ids)) for result in results] == [("stale", 4)] * 3
    assert running.summary.metrics == {"histogram/staleness": [], "stale_rate": 1.0}
    assert running.summary.policy == PolicyVersions(oldest="3", newest="3", current="5")


@pytest.mark.parametrize(
    ("body_bytes", "num_generations", "inline"),
    [
        (MOST_BYTES_PREPARED_INLINE, MOST_GENERATIONS_PREPARED_INLINE, True),
        (MOST_BYTES_PREPARED_INLINE + 1, 1, False),
        (0, MOST_GENERATIONS_PREPARED_INLINE + 1, False),
    ],
)
def test_a_large_request_is_prepared_in_a_thread_and_a_small_one_is_not(
    body_bytes: int, num_generations: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    groups = EpisodeFactory.groups

    def noting(*arguments: Any) -> list[Episode]:
        threads.append(threading.get_ident())
        return groups(*arguments)

    monkeypatch.setattr(EpisodeFactory, "groups", noting)
    service = Service()
    results = virtual_time.run(service.play(request_of(num_generations=num_generations), body_bytes))
    assert len(results) == num_generations
    assert {request.request_id for request in service.generator.requests} == {"request"}
    assert [thread == threading.get_ident() for thread in threads] == [inline]


@pytest.mark.parametrize("closes", [True, False])
async def test_a_rollout_that_is_never_iterated_starts_nothing(closes: bool) -> None:
    service = Service()
    running = await service.rollouts.rollout(request_of(deadline_s=60), "request", 0)
    await virtual_time.settled()
    if closes:
        await running.aclose()
    del running
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (service.has_started_something, service.generator.released) == (False, [])


async def test_with_on_error_fail_the_failed_sample_is_yielded_and_raised() -> None:
    generator = ScriptedGenerator(["A", "A", "A", GenerationRejected("no")])
    generator.delay_of = lambda _: 60 if len(generator.requests) < 4 else 0
    service = Service(generator=generator)
    request = request_of(SAMPLE, SAMPLE, num_generations=2, on_error="fail", retries=0)
    running = await service.rollouts.rollout(request, "request", 0)
    yielded = []

    async def drain() -> None:
        async for position, result in running:
            yielded.append((position, result.status))

    with pytest.raises(RequestProblem) as failed:
        await drain()
    assert yielded == [(3, "error")]
    [error] = failed.value.problem.errors
    assert (error.field, error.value, error.message) == ("samples[1]", "generation", "generation 1 failed: no")
    assert generator.cancelled == 3


async def test_the_summary_is_that_of_the_samples_yielded_so_far() -> None:
    service = Service(generator=slow_after_the_first(1))
    running = await service.rollouts.rollout(request_of(num_generations=2), "request", 0)
    assert running.summary.model_dump()["metrics"] == {}
    turns = []
    async for _ in running:
        turns.append(running.summary.metrics["total_turns"])
    assert turns == [1, 2]
    assert running.summary.request_id == running.request_id == "request"
    service.policy.note(at_version(5))
    assert running.summary.policy == PolicyVersions(oldest=None, newest=None, current="5")


def test_early_stopping_as_the_request_asks_for_it() -> None:
    service = Service(generator=slow_after_the_first(60))
    results = virtual_time.run(service.play(request_of(num_generations=3, keep={"per_group": 1})))
    assert [results[position].status for position in range(3)] == ["completed", "cancelled", "cancelled"]


@pytest.mark.parametrize(("schedule", "steps_began_at"), [("lockstep", [9, 9]), ("async", [0, 9])])
def test_the_schedule_is_the_one_that_the_request_names(schedule: str, steps_began_at: list[float]) -> None:
    class Noting(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            began_at.append(virtual_time.now())
            return await super().step(request)

    began_at: list[float] = []
    service = Service(generator=slow_after_the_first(9), math=Noting([outcome(terminated=True)]))
    virtual_time.run(service.play(request_of(num_generations=2, schedule=schedule)))
    assert began_at == steps_began_at

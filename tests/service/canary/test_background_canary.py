"""Which generations are checked, on which replica, and what a difference leads to. In virtual time."""

import asyncio
import logging
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from deployments.failures import GenerationLost
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
    WeightSpan,
)
from service.canary.background_canary import BackgroundCanary, ComparedReplicas
from service.settings import CanarySettings
from tests import virtual_time

REQUEST = GenerationRequest("one-0", [1, 2, 3], 9, (), SamplingOptions(), request_id="r")
GENERATION = Generation([4, 5], [-0.5, -1.0], "stop", (WeightSpan("6", 0, 2),))
SCORE = ScoredPrompt([], [], "length", prompt_logprobs=[-0.5, -1.0], weight_version="6")
WRONG = replace(SCORE, prompt_logprobs=[-5.0, -5.0])
EVERY = CanarySettings(rate=1.0)


@dataclass
class ScriptedReplicas(ComparedReplicas):
    """Scores take a second. A faulty replica scores wrongly."""

    running: tuple[str, ...] = ("a", "b", "c")
    faulty: str = ""
    score: Generation | Exception = SCORE
    asked: list[tuple[str, ScoringRequest]] = field(default_factory=list)
    taken_out: list[str] = field(default_factory=list)

    def replicas(self) -> tuple[str, ...]:
        return self.running

    async def score_on(self, replica: str, request: ScoringRequest) -> Generation:
        self.asked.append((replica, request))
        await asyncio.sleep(1)
        if isinstance(self.score, Exception):
            raise self.score
        return WRONG if replica == self.faulty else self.score

    def take_out_of_service(self, replica: str, reason: str) -> None:
        self.taken_out.append(replica)


def noted(
    replicas: ScriptedReplicas,
    *generations: Generation,
    request: GenerationRequest = REQUEST,
    settings: CanarySettings = EVERY,
) -> None:
    """Replica a has returned the generations, one every two seconds."""

    async def run() -> None:
        canary = BackgroundCanary(settings, replicas, Random(0))
        for generation in generations:
            canary.note(request, generation, "a")
            await asyncio.sleep(2)

    virtual_time.run(run())


def test_what_a_replica_generated_is_scored_on_another_one() -> None:
    replicas = ScriptedReplicas()
    noted(replicas, *[GENERATION] * 20)
    assert {replica for replica, _ in replicas.asked} == {"b", "c"}
    asked = replicas.asked[0][1]
    assert (asked.prompt_token_ids, asked.start) == ([1, 2, 3, 4, 5], 3)
    assert (asked.generation_id, asked.request_id) == ("canary-one-0", "r")
    assert replicas.taken_out == []


@pytest.mark.parametrize(
    ("request_", "generation"),
    [
        (replace(REQUEST, sampling=SamplingOptions(temperature=0.5)), GENERATION),
        (replace(REQUEST, sampling=SamplingOptions(top_p=0.9)), GENERATION),
        (replace(REQUEST, sampling=SamplingOptions(top_k=5)), GENERATION),
        (replace(REQUEST, sampling=SamplingOptions(min_p=0.1)), GENERATION),
        (REQUEST, Generation([], [], "stop")),
        (REQUEST, replace(GENERATION, weight_versions=(WeightSpan("6", 0, 1), WeightSpan("7", 1, 2)))),
        (replace(REQUEST, prompt_token_ids=[1] * 8191), GENERATION),
        (ScoringRequest("score", [1, 2], 1, (), SamplingOptions()), GENERATION),
    ],
)
def test_what_a_score_cannot_be_compared_with_is_not_checked(
    request_: GenerationRequest, generation: Generation
) -> None:
    replicas = ScriptedReplicas()
    noted(replicas, generation, request=request_)
    assert replicas.asked == []


@pytest.mark.parametrize("sampling", [SamplingOptions(seed=3), SamplingOptions(ignore_eos=True)])
def test_seeds_and_the_end_of_sequence_do_not_matter(sampling: SamplingOptions) -> None:
    replicas = ScriptedReplicas()
    noted(replicas, GENERATION, request=replace(REQUEST, sampling=sampling))
    assert len(replicas.asked) == 1


def test_a_single_replica_is_compared_with_none() -> None:
    replicas = ScriptedReplicas(running=("a",))
    noted(replicas, GENERATION)
    assert replicas.asked == []


def test_the_rate_is_the_share_of_generations_that_are_checked() -> None:
    replicas = ScriptedReplicas()
    noted(replicas, *[GENERATION] * 1000, settings=CanarySettings(rate=0.1))
    assert 70 <= len(replicas.asked) <= 130


def test_one_generation_is_checked_at_a_time() -> None:
    replicas = ScriptedReplicas()

    async def run() -> None:
        canary = BackgroundCanary(EVERY, replicas)
        for _ in range(3):
            canary.note(REQUEST, GENERATION, "a")
        await asyncio.sleep(2)
        canary.note(REQUEST, GENERATION, "a")
        await asyncio.sleep(2)

    virtual_time.run(run())
    assert len(replicas.asked) == 2


def test_a_replica_that_differs_from_two_others_is_taken_out_of_service(caplog: pytest.LogCaptureFixture) -> None:
    replicas = ScriptedReplicas(score=WRONG)
    noted(replicas, *[GENERATION] * 12)
    assert replicas.taken_out[0] == "a"
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == len(replicas.taken_out)


def test_a_replica_that_scores_wrongly_is_taken_out_of_service_in_place_of_those_that_it_scored() -> None:
    replicas = ScriptedReplicas(faulty="c")

    async def run() -> None:
        canary = BackgroundCanary(EVERY, replicas, Random(0))
        for number in range(40):
            canary.note(REQUEST, GENERATION, "ab"[number % 2])
            await asyncio.sleep(2)
            if replicas.taken_out:
                return

    virtual_time.run(run())
    assert replicas.taken_out == ["c"]


@pytest.mark.parametrize(
    "score", [GenerationLost("gone"), replace(WRONG, weight_version="7"), Generation([], [], "abort")]
)
def test_a_check_without_a_score_by_the_same_weights_says_nothing(score: Generation | Exception) -> None:
    replicas = ScriptedReplicas(score=score)
    noted(replicas, *[GENERATION] * 12)
    assert (len(replicas.asked), replicas.taken_out) == (12, [])

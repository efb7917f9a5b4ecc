"""Plays scripted episodes in virtual time; generators and environments whose answers depend on their input alone."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from typing import Any, Literal

from hypothesis import strategies as st

from deployments.failures import TurnTimedOut
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import (
    Environment,
    Generation,
    GenerationRequest,
    Generator,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from rollout_client.contract.rollouts import Keep, SampleResult
from rollout_env import StepOutcome
from service.rollouts.episode import Episode
from service.rollouts.group_selection import EarlyStopping
from service.rollouts.loop import RolloutContext, _play_sample, play_request
from service.rollouts.pacing import Schedule
from tests import virtual_time
from tests.service.scripted import (
    EpisodeRecipe,
    ScriptedEnvironment,
    ScriptedGenerator,
    first_part,
    ids_of,
    outcome,
    text_of,
)

KEEP_ALL = Keep()


def async_context(generator: Generator, environment: Environment) -> RolloutContext:
    return RolloutContext(generator, {"task": environment}, Schedule())


def play(recipe: EpisodeRecipe, generator: Generator, environment: Environment) -> SampleResult:
    """Plays one episode."""
    return virtual_time.run(_play_sample(recipe.make(), async_context(generator, environment))).result()


def playing(
    episodes: list[Episode], context: RolloutContext, keep: Keep = KEEP_ALL, deadline_s: float | None = None
) -> aclosing[AsyncGenerator[Episode, None]]:
    """A request whose episodes are played as long as this context is open."""
    early_stopping = EarlyStopping(keep, {episode: episode.identity.group for episode in episodes})
    return aclosing(play_request(episodes, context, early_stopping, deadline_s))


@virtual_time.synchronous
async def collect(
    episodes: list[Episode], context: RolloutContext, keep: Keep = KEEP_ALL, deadline_s: float | None = None
) -> dict[int, SampleResult]:
    """Plays a request. Gives its results by position, in the order in which they were yielded."""
    async with playing(episodes, context, keep, deadline_s) as ended:
        return {episode.identity.position: episode.result() async for episode in ended}


def error_of(result: SampleResult) -> dict[str, Any]:
    assert result.error is not None
    return result.error.model_dump()


def generation_due(episode: Episode) -> GenerationRequest:
    """The generation that comes next; there must be one."""
    request = episode.next_generation()
    assert request is not None
    return request


def texts(result: SampleResult) -> list[str]:
    return [message.content for message in result.message_log]


class RandomGenerator(ScriptedGenerator):
    """Decodes greedily: each token, its log-probability and the end are drawn with all ids before it as seed.

    So a generation that is interrupted and goes on has the tokens of an uninterrupted one.
    """

    def __init__(self) -> None:
        super().__init__(script=[])

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(random.Random(repr(request.prompt_token_ids)).randrange(4))
        return greedy_generation(request)


def greedy_generation(request: GenerationRequest) -> Generation:
    prompt, response, logprobs = list(request.prompt_token_ids), "", list[float]()
    finish_reason: Literal["stop", "length"] = "length"
    while finish_reason == "length" and len(response) < request.max_new_tokens:
        draw = random.Random(repr(prompt + ids_of(response)))
        if draw.random() < 0.2:
            finish_reason = "stop"
            break
        response += draw.choice("abc")
        logprobs.append(-draw.randrange(1, 9) / 8)
        if any(stop_string in response for stop_string in request.stop_strings):
            finish_reason = "stop"
    versions = versions_from(len(prompt), len(response))
    replica = f"replica {request.turn % 2}"
    return Generation(packed_ids(ids_of(response)), packed_logprobs(logprobs), finish_reason, versions, replica=replica)


def versions_from(first: int, tokens: int) -> tuple[WeightSpan, ...]:
    """The version changes at every seventh token of the rollout; `first` is the place of the first of these."""
    changes = [0, *(place for place in range(1, tokens) if (first + place) % 7 == 0), tokens]
    return tuple(WeightSpan(str((first + start) // 7), start, end) for start, end in pairwise(changes) if end > start)


class InterruptedGenerator(RandomGenerator):
    """Interrupts each generation with a probability of 2/3, after any number of its tokens, some with a failure."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)

    async def generate(self, request: GenerationRequest) -> Generation:
        whole = await super().generate(request)
        cut = self._draw.choice(["whole", "part", "stalled"])
        if cut == "whole":
            return whole
        failure = TurnTimedOut("no new token") if cut == "stalled" else None
        # Unless its last token is what ends it, a generation can be interrupted after that one, too.
        text = text_of(whole.token_ids)
        is_open = whole.finish_reason == "stop" and not any(stop in text for stop in request.stop_strings)
        return first_part(whole, self._draw.randrange(len(text) + is_open or 1), failure)


class RandomEnvironment(ScriptedEnvironment):
    """Its outcome and the time that it takes are drawn with what was said and `extra_env_info` as seed."""

    def __init__(self) -> None:
        super().__init__(script=[])

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        said = [(message["role"], message["content"]) for message in request.message_log]
        draw = random.Random(repr((said, request.extra_env_info)))
        await asyncio.sleep(draw.randrange(4))
        return StepOutcome(
            {"role": "user", "content": "".join(draw.choices("xyz", k=draw.randrange(6)))},
            reward=draw.choice([0.0, 0.5, 1.0]),
            terminated=draw.random() < 0.2,
            metadata=draw.choice([None, {"state": draw.randrange(9)}]),
            next_stop_strings=draw.choice([None, [], ["a"], ["ab", "ccb"], ["abab"]]),
        )


texts_of_any_length = st.text(alphabet="abc", max_size=6)
outcomes = st.builds(
    outcome, content=texts_of_any_length, reward=st.sampled_from([0.0, 0.5, 1.0]), terminated=st.booleans()
)
recipes = st.builds(
    EpisodeRecipe,
    prompt=st.text(alphabet="q", min_size=1, max_size=6),
    max_seq_len=st.integers(6, 30),
    max_new_tokens=st.none() | st.integers(1, 5),
    max_rollout_turns=st.integers(1, 6),
    observation_format=st.sampled_from(["raw", "chat"]),
    stop_strings=st.sampled_from([(), ("b",), ("aab", "ca"), ("cbcb",)]),
)

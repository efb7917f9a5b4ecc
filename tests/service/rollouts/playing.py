"""Plays scripted episodes in virtual time; generators and environments whose answers depend on their input alone."""

import asyncio
import random
from contextlib import aclosing

from hypothesis import strategies as st

from deployments.protocols import Environment, Generation, GenerationRequest, Generator, StepRequest
from rollout_client.contract import Keep, SampleResult
from rollout_env import StepOutcome
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import Episode
from service.rollouts.loop import RolloutContext, play_request, play_sample
from service.rollouts.schedule import AsyncSchedule
from tests import virtual_time
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, ids_of, outcome

KEEP_ALL = Keep()


def async_context(generator: Generator, environment: Environment) -> RolloutContext:
    return RolloutContext(generator, {"task": environment}, AsyncSchedule())


def play(recipe: EpisodeRecipe, generator: Generator, environment: Environment) -> SampleResult:
    """Plays one episode."""
    return virtual_time.run(play_sample(recipe.make(), async_context(generator, environment))).result()


def collect(
    episodes: list[Episode], context: RolloutContext, keep: Keep = KEEP_ALL, deadline_s: float | None = None
) -> dict[int, SampleResult]:
    """Plays a request. Gives its results by position, in the order in which they were yielded."""
    early_stopping = EarlyStopping(keep, {episode: episode.identity.group for episode in episodes})

    async def drain() -> dict[int, SampleResult]:
        async with aclosing(play_request(episodes, context, early_stopping, deadline_s)) as ended:
            return {episode.identity.position: episode.result() async for episode in ended}

    return virtual_time.run(drain())


def texts(result: SampleResult) -> list[str]:
    return [message.content for message in result.message_log]


class RandomGenerator(ScriptedGenerator):
    """Its response and the time that it takes are drawn with the prompt's ids as seed."""

    def __init__(self) -> None:
        super().__init__(script=[])

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        draw = random.Random(repr(request.prompt_token_ids))
        await asyncio.sleep(draw.randrange(4))
        response = "".join(draw.choices("abc", k=draw.randrange(6)))
        token_ids = ids_of(response)[: request.max_new_tokens]
        cut = len(response) >= request.max_new_tokens
        return Generation(token_ids, [-1.0] * len(token_ids), "length" if cut else "stop")


class RandomEnvironment(ScriptedEnvironment):
    """Its outcome and the time that it takes are drawn with the messages and `extra_env_info` as seed."""

    def __init__(self) -> None:
        super().__init__(script=[])

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        draw = random.Random(repr((request.message_log, request.extra_env_info)))
        await asyncio.sleep(draw.randrange(4))
        return StepOutcome(
            {"role": "user", "content": "".join(draw.choices("xyz", k=draw.randrange(6)))},
            reward=draw.choice([0.0, 0.5, 1.0]),
            terminated=draw.random() < 0.2,
            metadata=draw.choice([None, {"state": draw.randrange(9)}]),
            next_stop_strings=draw.choice([None, ["s"]]),
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
)

"""The law of `play`: the same replies give what they give in the service's rollout loop."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from deployments.protocols.environments import StepRequest
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment, play
from rollout_env.steps import validated_step
from tests.fakes.environment import StepsAlone
from tests.service.rollouts import playing
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


class NumberedOutcomes(StepsAlone):
    """Answers the n-th turn of a rollout with its n-th outcome."""

    ExtraEnvInfo = Anything

    def __init__(self, outcomes: list[StepOutcome]) -> None:
        self.outcomes = outcomes

    async def step(self, message_log: list[ChatMessage], extra_env_info: Anything) -> StepOutcome:
        turn = sum(message["role"] == "assistant" for message in message_log)
        outcome = self.outcomes[turn - 1]
        return replace(outcome, answer=f"{outcome.answer} {extra_env_info.model_dump()}")


class HostedEnvironment(ScriptedEnvironment):
    """The port of the rollout loop, over an environment as the host steps it."""

    def __init__(self, environment: TaskEnvironment) -> None:
        super().__init__(script=[])
        self.environment = environment

    async def step(self, request: StepRequest) -> StepOutcome:
        return await validated_step(self.environment, request.message_log, request.extra_env_info)


letters = st.text(alphabet="abc", max_size=4)
states = st.dictionaries(st.text(alphabet="abc", min_size=1, max_size=2), st.integers(0, 9), max_size=3)
rewards = st.sampled_from([0.0, 0.25, 1.0])
outcomes = st.builds(
    StepOutcome,
    observation=st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": letters}),
    reward=rewards | st.dictionaries(st.sampled_from(["right", "style", "reward"]), rewards, max_size=3),
    terminated=st.sampled_from([False, False, True]),
    metadata=st.none() | states,
    next_stop_strings=st.none() | st.lists(st.sampled_from(["x", "y"]), max_size=2),
    answer=st.none() | letters,
    metrics=st.none() | st.dictionaries(st.sampled_from(["calls", "seconds"]), st.integers(0, 9)),
)
silent = outcomes.map(lambda outcome: replace(outcome, observation=None, terminated=True))
turns = st.lists(st.tuples(letters.filter(bool), outcomes | silent), min_size=1, max_size=5)


@given(turns, states, st.lists(st.sampled_from(["x", "y"]), max_size=2))
def test_a_play_gives_what_the_rollout_loop_gives(
    scripted: list[tuple[str, StepOutcome]], info: dict[str, Any], stop_strings: list[str]
) -> None:
    replies, of_turns = [reply for reply, _ in scripted], [outcome for _, outcome in scripted]
    environment = NumberedOutcomes(of_turns)
    recipe = EpisodeRecipe(extra_env_info=info, stop_strings=tuple(stop_strings), max_rollout_turns=len(scripted))
    rollout = playing.play(recipe, ScriptedGenerator(replies), HostedEnvironment(environment))
    sample = {"messages": [{"role": "user", "content": "Q"}], "extra_env_info": info, "stop_strings": stop_strings}
    played = play(environment, replies, sample)
    assert played.message_log == [{"role": message.role, "content": message.content} for message in rollout.message_log]
    assert played.metrics == rollout.metrics.environment
    assert (played.rewards, played.total_reward) == (rollout.rewards, rollout.total_reward)
    assert (played.terminated, played.extra_env_info) == (rollout.terminated, rollout.extra_env_info)
    assert (list(played.stop_strings), played.answers[-1]) == (rollout.stop_strings, rollout.answer)
    assert [turn.reply for turn in played.turns] == replies[: len(played.turns)]
    assert played.unused_replies == replies[len(played.turns) :]

"""Rollouts whose environment holds a session for them: they are played anew when it is lost, and release it."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from deployments.failures import EnvironmentLost, RestartableSessionLost, SessionLost
from deployments.protocols.generation import Generation, GenerationRequest
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import Keep
from rollout_env import StepOutcome
from service.rollouts.group_selection import EarlyStopping
from service.rollouts.loop import play_request
from tests import virtual_time
from tests.service.rollouts.playing import KEEP_ALL, async_context, collect, play, texts
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, ids_of, outcome

LOST = RestartableSessionLost("The session of the rollout is gone: it must be played anew from its prompt.")
FIRST = StepOutcome({"role": "user", "content": "1"}, {"a": 0.5}, False, {"state": 1}, ["!"], "one")
LAST = outcome("2", 1.0, terminated=True)


@dataclass
class SessionEnvironment(ScriptedEnvironment):
    """Writes down which sessions were released."""

    released: list[str] = field(default_factory=list)

    def release(self, session_id: str) -> None:
        self.released.append(session_id)


def sessions_of(environment: SessionEnvironment) -> list[tuple[str, int]]:
    """Session and turn of each step."""
    return [(request.session_id, request.turn) for request in environment.requests]


def test_a_rollout_whose_session_is_lost_is_played_anew_from_its_prompt() -> None:
    environment = SessionEnvironment([FIRST, LOST, FIRST, LAST])
    generator = ScriptedGenerator(["A", "B", "C", "D"])
    result = collect([EpisodeRecipe(retries=1).make()], async_context(generator, environment))[0]
    assert (result.status, result.error) == ("completed", None)
    assert texts(result) == ["Q", "C", "1", "D", "2"]
    assert result.rewards == {"a": 0.5, "reward": 1.0}
    assert list(generator.requests[2].prompt_token_ids) == ids_of("Q")
    assert [request.stop_strings for request in generator.requests] == [(), ("!",), (), ("!",)]
    assert [request.extra_env_info for request in environment.requests] == [{"state": 0}, {"state": 1}] * 2
    assert sessions_of(environment) == [
        ("request-0-0-0", 0),
        ("request-0-0-0", 1),
        ("request-0-0-1", 0),
        ("request-0-0-1", 1),
    ]
    assert environment.released == ["request-0-0-0", "request-0-0-1"]
    assert result.metrics.turn_count == 2


def test_playing_anew_costs_a_retry() -> None:
    environment = SessionEnvironment([FIRST, LOST])
    result = play(EpisodeRecipe(retries=1), ScriptedGenerator(["A"]), environment)
    assert result.error is not None
    assert result.error.model_dump() == {"kind": "environment", "message": str(LOST), "retryable": True}
    assert texts(result) == ["Q", "A", "1", "A"]
    assert len(environment.requests) == 4


def test_the_step_whose_session_is_lost_is_not_made_again() -> None:
    lost = SessionLost("The session of the rollout is gone, and with it the state of the rollout.")
    environment = SessionEnvironment([FIRST, lost])
    result = play(EpisodeRecipe(retries=5), ScriptedGenerator(["A"]), environment)
    assert result.error is not None
    assert result.error.model_dump() == {"kind": "environment", "message": str(lost), "retryable": True}
    assert len(environment.requests) == 2


def test_a_lost_replica_costs_a_retry_of_the_step_and_one_of_the_rollout() -> None:
    environment = SessionEnvironment([FIRST, EnvironmentLost("The replica died."), LOST, FIRST, LAST])
    assert play(EpisodeRecipe(retries=2), ScriptedGenerator(["A"]), environment).status == "completed"
    environment = SessionEnvironment([FIRST, EnvironmentLost("The replica died."), LOST, FIRST, LAST])
    assert play(EpisodeRecipe(retries=1), ScriptedGenerator(["A"]), environment).status == "error"


def test_a_posted_log_whose_steps_were_made_elsewhere_is_not_played_anew() -> None:
    def posted(prompt: str) -> list[Message]:
        response = Message(
            role="assistant", content="A", token_ids=[65], generation_logprobs=[-1.0], finish_reason="stop"
        )
        observed = Message(role="user", content="1", token_ids=[49])
        return [Message(role="user", content=prompt, token_ids=ids_of(prompt)), response, observed]

    environment = SessionEnvironment([LOST])
    result = play(EpisodeRecipe(retries=5, message_log=posted), ScriptedGenerator(["B"]), environment)
    assert result.error is not None
    assert sessions_of(environment) == [("request-0-0-0", 1)]
    assert texts(result) == ["Q", "A", "1", "B"]


def test_a_posted_first_response_is_played_anew() -> None:
    def posted(prompt: str) -> list[Message]:
        response = Message(
            role="assistant", content="A", token_ids=[65], generation_logprobs=[-1.0], finish_reason="stop"
        )
        return [Message(role="user", content=prompt, token_ids=ids_of(prompt)), response]

    environment = SessionEnvironment([FIRST, LOST, FIRST, LAST])
    result = play(EpisodeRecipe(retries=5, message_log=posted), ScriptedGenerator(["B", "C"]), environment)
    assert texts(result) == ["Q", "A", "1", "C", "2"]


def test_every_end_of_a_rollout_releases_its_session() -> None:
    class ForOne(ScriptedGenerator):
        """Only the first rollout is quick."""

        async def generate(self, request: GenerationRequest) -> Generation:
            await asyncio.sleep(1 if request.rollout_id == "request-0-0" else 60)
            return await super().generate(request)

    environment = SessionEnvironment([outcome("2", 1.0, terminated=True)])
    recipes: Sequence[EpisodeRecipe] = [EpisodeRecipe(position=position) for position in range(3)]
    collect(
        [recipe.make() for recipe in recipes],
        async_context(ForOne(["A"]), environment),
        Keep(per_group=1),
        deadline_s=9,
    )
    assert sorted(environment.released) == ["request-0-0-0", "request-1-0-0", "request-2-0-0"]


@virtual_time.test
async def test_a_request_that_is_cancelled_releases_its_sessions() -> None:
    environment = SessionEnvironment([outcome("1")])
    episodes = [replace(EpisodeRecipe(max_rollout_turns=10**6), position=position).make() for position in range(2)]
    early_stopping = EarlyStopping(KEEP_ALL, dict.fromkeys(episodes, 0))

    generator = ScriptedGenerator(["A"], delay_s=1.0)
    async with aclosing(play_request(episodes, async_context(generator, environment), early_stopping)) as ended:
        first = asyncio.ensure_future(anext(ended))
        await asyncio.sleep(3)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert sorted(environment.released) == ["request-0-0-0", "request-1-0-0"]

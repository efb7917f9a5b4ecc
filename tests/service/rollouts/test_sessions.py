"""Rollouts whose environment holds a session for them: they are played anew when it is lost, and release it."""

import asyncio
from dataclasses import dataclass, field

import pytest

from deployments.failures import EnvironmentLost, RestartableSessionLost, SessionLost
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import Keep
from rollout_env import StepOutcome
from tests.service.rollouts.playing import async_context, collect, error_of, play, playing, texts
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, ids_of, outcome, user_message

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
    made = SessionEnvironment([FIRST, LOST, FIRST, LAST])
    generator = ScriptedGenerator(["A", "B", "C", "D"])
    result = collect([EpisodeRecipe(retries=1).make()], async_context(generator, made))[0]
    assert (result.status, result.error) == ("completed", None)
    assert texts(result) == ["Q", "C", "1", "D", "2"]
    assert result.rewards == {"a": 0.5, "reward": 1.0}
    assert list(generator.requests[2].prompt_token_ids) == ids_of("Q")
    assert [request.stop_strings for request in generator.requests] == [(), ("!",), (), ("!",)]
    assert [request.extra_env_info for request in made.requests] == [{"state": 0}, {"state": 1}] * 2
    assert sessions_of(made) == [("request-0-0-0", 0), ("request-0-0-0", 1), ("request-0-0-1", 0), ("request-0-0-1", 1)]
    assert made.released == ["request-0-0-0", "request-0-0-1"]
    assert result.metrics.turn_count == 2


@pytest.mark.parametrize(
    ("lost", "retries", "log", "steps"),
    [
        (LOST, 1, ["Q", "A", "1", "A"], 4),
        (SessionLost("The session is gone, and with it the state of the rollout."), 5, ["Q", "A", "1", "A"], 2),
    ],
)
def test_playing_anew_costs_a_retry_and_is_not_done_for_every_loss(
    lost: SessionLost, retries: int, log: list[str], steps: int
) -> None:
    environment = SessionEnvironment([FIRST, lost])
    result = play(EpisodeRecipe(retries=retries), ScriptedGenerator(["A"]), environment)
    assert error_of(result) == {"kind": "environment", "message": str(lost), "retryable": True}
    assert (texts(result), len(environment.requests)) == (log, steps)


@pytest.mark.parametrize(("retries", "status"), [(2, "completed"), (1, "error")])
def test_a_lost_replica_costs_a_retry_of_the_step_and_one_of_the_rollout(retries: int, status: str) -> None:
    environment = SessionEnvironment([FIRST, EnvironmentLost("The replica died."), LOST, FIRST, LAST])
    assert play(EpisodeRecipe(retries=retries), ScriptedGenerator(["A"]), environment).status == status


@pytest.mark.parametrize(
    ("observed", "texts_of_log"), [([user_message("1")], ["Q", "A", "1", "B"]), ([], ["Q", "A", "1", "C", "2"])]
)
def test_only_a_posted_log_without_steps_is_played_anew(observed: list[Message], texts_of_log: list[str]) -> None:
    response = Message(role="assistant", content="A", token_ids=[65], generation_logprobs=[-1.0], finish_reason="stop")
    recipe = EpisodeRecipe(retries=5, message_log=lambda _: [user_message("Q"), response, *observed])
    environment = SessionEnvironment([LOST] if observed else [FIRST, LOST, FIRST, LAST])
    result = play(recipe, ScriptedGenerator(["B", "C"]), environment)
    assert texts(result) == texts_of_log
    assert (result.status, sessions_of(environment)[0]) == (
        ("error", ("request-0-0-0", 1)) if observed else ("completed", ("request-0-0-0", 0))
    )


def test_every_end_of_a_rollout_releases_its_session() -> None:
    environment = SessionEnvironment([outcome("2", 1.0, terminated=True)])
    generator = ScriptedGenerator(["A"], delay_of=lambda request: 1 if request.rollout_id == "request-0-0" else 60)
    episodes = [EpisodeRecipe(position=position).make() for position in range(3)]
    collect(episodes, async_context(generator, environment), Keep(per_group=1), deadline_s=9)
    assert sorted(environment.released) == ["request-0-0-0", "request-1-0-0", "request-2-0-0"]


async def test_a_request_that_is_cancelled_releases_its_sessions() -> None:
    environment = SessionEnvironment([outcome("1")])
    episodes = [EpisodeRecipe(position=position, max_rollout_turns=10**6).make() for position in range(2)]
    async with playing(episodes, async_context(ScriptedGenerator(["A"], delay_s=1.0), environment)) as ended:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(ended), 3)
    assert sorted(environment.released) == ["request-0-0-0", "request-1-0-0"]

"""Samples of tasks that programs play: what is asked of them, and with what their sessions are opened."""

from typing import Any

import pytest

from deployments.agents.settings import AgentSettings
from rollout_client.contract.rollouts import RolloutRequest
from rollout_client.contract.sessions import SessionLimits
from service.problems import RequestProblem
from service.rollout_requests.episodes import EpisodeFactory
from service.rollouts.agent_episode import AgentEpisode
from service.rollouts.episode import Episode
from tests.service.rollout_requests.episode_making import made_episodes
from tests.service.scripted_http import DESCRIPTION, LIMITS, tokenizer

AGENT = AgentSettings(import_path="agents:agent", limits=SessionLimits(max_calls=30, max_tokens=500))
FACTORY = EpisodeFactory(frozenset({"played", "math"}), DESCRIPTION, tokenizer, LIMITS, {"played": AGENT})
QUESTION = [{"role": "user", "content": "Q"}]


def made(sample: dict[str, Any], **request: Any) -> list[Episode]:
    body = {"samples": [{"task_name": "played", **sample}], **request}
    return made_episodes(FACTORY, RolloutRequest.model_validate(body), "mine")


def sessions_of(sample: dict[str, Any], **request: Any) -> list[Any]:
    episodes = made(sample, **request)
    assert all(isinstance(episode, AgentEpisode) for episode in episodes)
    return [episode.next_run().session for episode in episodes if isinstance(episode, AgentEpisode)]


def test_the_sessions_of_a_group_are_opened_as_the_request_says() -> None:
    sessions = sessions_of(
        {"messages": QUESTION, "id": "a", "level": 3, "stop_strings": ["!"]},
        num_generations=2,
        sampling={"temperature": 0.5, "seed": 4, "max_new_tokens": 9},
        policy={"max_staleness": 2},
        priority="batch",
    )
    assert [session.generation_index for session in sessions] == [0, 1]
    [session, other] = sessions
    assert session.model_copy(update={"generation_index": 1}) == other
    assert (session.sample.id, session.sample.model_extra) == ("a", {"level": 3})
    sampling = session.sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop_strings) == (0.5, 9, ["!"])
    assert sampling.seed not in (None, 4)
    assert (session.policy.max_staleness, session.priority) == (2, "batch")
    assert (session.limits.max_calls, session.limits.max_tokens, session.deadline_s) == (30, 500, None)


def test_turns_that_a_request_asks_for_bound_the_calls() -> None:
    assert [session.limits.max_calls for session in sessions_of({}, max_rollout_turns=3)] == [3]
    assert [session.limits.max_calls for session in sessions_of({}, max_rollout_turns=50)] == [30]


def test_a_sample_of_an_agent_may_have_no_prompt_or_a_long_one() -> None:
    [without] = made({})
    [long] = made({"messages": [{"role": "user", "content": "Q" * 1000}]})
    assert (without.status, long.status) == (None, None)
    assert long.result().message_log == []


LOG = [{"role": "user", "content": "a", "token_ids": [64]}]


@pytest.mark.parametrize(
    ("sample", "request_", "field", "says"),
    [
        ({"message_log": LOG}, {}, "samples[0].message_log", "post the sample's messages in its place"),
        ({}, {"include": ["entropy"]}, "include[0]", "it needs sampling.top_k at least 1"),
        ({"messages": QUESTION}, {"schedule": "lockstep"}, "schedule", "a program plays played"),
        ({"messages": QUESTION}, {"history": "template"}, "history", "a program plays played"),
    ],
)
def test_what_none_can_play_is_refused(sample: dict[str, Any], request_: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(RequestProblem) as raised:
        made(sample, **request_)
    [problem] = raised.value.problem.errors
    assert (problem.field, says in problem.message) == (field, True)


def test_the_session_of_an_agent_includes_what_the_request_does() -> None:
    [session] = sessions_of({}, include=["top_logprobs:2"])
    [plain] = sessions_of({})
    assert (session.include, plain.include) == (["top_logprobs:2"], [])
    assert session.model_fields_set - plain.model_fields_set == {"include"}


def test_samples_of_other_tasks_are_played_by_the_service() -> None:
    [episode] = made({"task_name": "math", "messages": QUESTION})
    assert not isinstance(episode, AgentEpisode)

"""Rollouts that a program plays: what becomes of its runs, one after the other and beside each other."""

from dataclasses import replace
from typing import Any

import pytest

from deployments.failures import AgentFailed, AgentTimedOut, EnvironmentLost, EnvironmentShuttingDown
from deployments.protocols.images import name_of_image
from rollout_client.contract.messages import MediaRange
from rollout_client.contract.rollouts import SampleInput
from rollout_client.contract.sessions import SessionRequest
from rollout_env import StepOutcome
from service.rollouts.agent_episode import AgentRunOutcome, AgentTask
from service.rollouts.loop import RolloutContext
from service.rollouts.pacing import Schedule
from service.rollouts.staleness import VersionBounds
from tests.service.agents.agent_runs import TWO_CALLS, AgentRecipe, ScriptedAgents, branch, generated, said
from tests.service.rollouts.playing import KEEP_ALL, collect, error_of, texts
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, ids_of

ENDED = AgentRunOutcome([TWO_CALLS], calls=2, metrics={"agent_s": 1.5})
CRASHED = AgentFailed("The agent ended with exit code 3. It wrote to stderr last: no such file")
RIGHT = StepOutcome({"role": "user", "content": "Right."}, 1.0, True, {"state": 9}, None, "C", {"checks": 2.0})
SCORED_BY_AGENT = AgentTask(SessionRequest(sample=SampleInput(task_name="task")), "agent")


def context_of(agents: ScriptedAgents, environment: ScriptedEnvironment | None = None) -> RolloutContext:
    judge = environment or ScriptedEnvironment([RIGHT])
    return RolloutContext(ScriptedGenerator([]), {"task": judge}, Schedule(), agents=agents)


def played(recipe: AgentRecipe, *runs: AgentRunOutcome, environment: ScriptedEnvironment | None = None) -> Any:
    return collect([recipe.make()], context_of(ScriptedAgents(runs), environment))[0]


def test_the_environment_judges_the_last_conversation_in_one_step() -> None:
    judge = ScriptedEnvironment([RIGHT])
    result = played(AgentRecipe(), ENDED, environment=judge)
    [request] = judge.requests
    log = [("user", "Q"), ("assistant", "AB"), ("tool", "T"), ("assistant", "C")]
    assert [(message["role"], message["content"]) for message in request.message_log] == log
    assert (request.extra_env_info, request.turn) == ({"state": 0}, 0)
    assert (result.status, result.terminated, result.total_reward, result.answer) == ("completed", True, 1.0, "C")
    assert (result.message_log[-1].reward, result.extra_env_info) == (1.0, {"state": 9})


def test_the_result_has_the_engines_own_tokens_and_counts_them() -> None:
    result = played(AgentRecipe(), ENDED)
    assert [list(message.token_ids) for message in result.message_log] == [*map(ids_of, ("Q", "AB", "T", "C"))]
    assert [len(message.generation_logprobs or ()) for message in result.message_log] == [0, 2, 0, 1]
    metrics = result.metrics
    assert (metrics.turn_count, metrics.assistant_tokens, metrics.env_tokens) == (2, 3, 1)
    assert (metrics.turn_gen_tokens, metrics.turn_input_tokens) == ([2, 1], [1, 4])
    assert metrics.environment == {"agent_s": 1.5, "agent_calls": 2.0, "agent_branches": 1.0, "checks": 2.0}


def test_responses_of_calls_cut_by_their_length_are_clipped_turns() -> None:
    log = branch(said("user", "Q"), generated("AB", finish_reason="length"), said("tool", "T"), generated("C"))
    result = played(AgentRecipe(), AgentRunOutcome([log], calls=2))
    assert (result.metrics.turn_count, result.metrics.clipped_turns) == (2, 1)


def test_the_branch_that_ended_last_is_the_log() -> None:
    summary = branch(said("user", "S"), generated("sum"))
    left = branch(said("user", "Q"), generated("AB"), said("tool", "X"), generated("D"))
    result = played(AgentRecipe(), AgentRunOutcome([summary, left, TWO_CALLS], calls=5))
    assert texts(result) == ["Q", "AB", "T", "C"]
    first, second = result.branches
    assert [message.content for message in first.message_log] == ["S", "sum"]
    assert (first.shared_messages, second.shared_messages) == ([], [1])
    assert [*second.message_log[1].token_ids] == ids_of("AB")
    assert [*(second.message_log[1].generation_logprobs or ())] == [-0.5, -0.5]


def test_each_seat_of_a_game_has_a_log_and_rewards_of_its_own() -> None:
    won = branch(said("user", "0"), generated("AB"), rewards={"seat_0": 1.0})
    lost = branch(said("user", "1"), generated("C"), rewards={"seat_1": -1.0})
    result = played(AgentRecipe(task=SCORED_BY_AGENT), AgentRunOutcome([won, lost], calls=2))
    assert (texts(result), result.rewards, result.total_reward) == (["0", "AB"], {"seat_0": 1.0}, 1.0)
    [other] = result.branches
    assert ([*other.message_log[1].token_ids], other.rewards) == (ids_of("C"), {"seat_1": -1.0})


def test_branches_of_an_agent_that_share_rewards_are_no_seats() -> None:
    aside = branch(said("user", "S"), generated("sum"), rewards={"right": 0.5})
    main = branch(said("user", "Q"), generated("AB"), rewards={"right": 1.0})
    result = played(AgentRecipe(task=SCORED_BY_AGENT), AgentRunOutcome([aside, main], calls=2))
    assert (texts(result), "rewards" in result.branches[0].model_fields_set) == (["Q", "AB"], False)


def test_images_are_in_logs_branches_and_what_is_judged() -> None:
    shown = MediaRange(media=name_of_image(b"red"), start=0, end=1)
    asks = said("user", "Q").model_copy(update={"mm_ranges": [shown]})
    beside, judge = branch(asks, generated("D")), ScriptedEnvironment([RIGHT])
    run = AgentRunOutcome([beside, branch(asks, generated("A"))], calls=2)
    result = played(AgentRecipe(), run, environment=judge)
    assert result.message_log[0].mm_ranges == [shown]
    assert result.branches[0].message_log[0].mm_ranges == [shown]
    assert judge.requests[0].message_log[0]["images"] == [shown.media]


def test_an_agent_that_scores_its_task_is_not_judged() -> None:
    judge, log = ScriptedEnvironment([RIGHT]), branch(said("user", "Q"), generated("A"), rewards={"style": 0.25})
    run = replace(ENDED, branches=[log], reward={"right": 1.0})
    result = played(AgentRecipe(task=SCORED_BY_AGENT), run, environment=judge)
    assert (result.status, result.rewards, judge.requests) == ("completed", {"style": 0.25, "right": 1.0}, [])


def test_an_agent_that_scores_its_task_and_gives_no_reward_has_failed() -> None:
    result = played(AgentRecipe(task=SCORED_BY_AGENT), ENDED)
    assert (result.status, result.total_reward, result.error.kind) == ("error", None, "environment")
    assert "without a reward" in result.error.message


def test_an_agent_that_never_calls_the_model_has_failed() -> None:
    result = played(AgentRecipe(), AgentRunOutcome())
    assert (result.status, result.error.retryable, result.message_log) == ("error", False, [])
    assert "without a call of the model" in result.error.message


@pytest.mark.parametrize(
    ("failure", "retryable"), [(CRASHED, False), (AgentTimedOut("The agent was ended after 5 s, its timeout_s."), True)]
)
def test_a_crash_is_the_error_of_its_rollout_beside_what_was_generated(failure: AgentFailed, retryable: bool) -> None:
    agents = ScriptedAgents([replace(ENDED, failure=failure)])
    result = collect([AgentRecipe(retries=3).make()], context_of(agents))[0]
    assert (result.status, result.total_reward, texts(result)) == ("error", None, ["Q", "AB", "T", "C"])
    assert error_of(result) == {"kind": "environment", "message": str(failure), "retryable": retryable}
    assert len(agents.requests) == 1


def test_a_run_whose_replica_is_lost_is_made_again() -> None:
    lost = AgentRunOutcome([branch(said("user", "Q"), generated("lost"))], calls=1, failure=EnvironmentLost("It died."))
    agents = ScriptedAgents([lost, ENDED])
    result = collect([AgentRecipe(retries=1).make()], context_of(agents))[0]
    assert (result.status, texts(result)) == ("completed", ["Q", "AB", "T", "C"])
    assert result.metrics.environment["agent_calls"] == 2
    assert [request.run_id for request in agents.requests] == ["request-0-0-run-0", "request-0-0-run-1"]


def test_a_run_that_a_replica_hands_over_costs_no_retry() -> None:
    agents = ScriptedAgents([AgentRunOutcome(failure=EnvironmentShuttingDown("It is being shut down.")), ENDED])
    assert collect([AgentRecipe(retries=0).make()], context_of(agents))[0].status == "completed"


@pytest.mark.parametrize(
    ("limit", "failure", "status"),
    [("max_calls", CRASHED, "max_turns"), ("max_tokens", CRASHED, "truncated"), ("max_calls", None, "completed")],
)
def test_a_run_that_fails_at_a_limit_ends_and_is_judged(limit: Any, failure: AgentFailed | None, status: str) -> None:
    result = played(AgentRecipe(), replace(ENDED, failure=failure, limit=limit))
    assert (result.status, result.error, result.total_reward) == (status, None, 1.0)
    flags = (result.terminated, result.truncated, result.max_turns_reached)
    assert flags == (status == "completed", status == "truncated", status == "max_turns")


def test_tokens_that_are_too_old_at_the_end_make_the_rollout_stale() -> None:
    bounds = VersionBounds(max_staleness=1)
    bounds.note_current(5)
    result = played(AgentRecipe(bounds=bounds), ENDED)
    assert (result.status, texts(result)) == ("stale", ["Q", "AB", "T", "C"])


def test_a_deadline_ends_runs_without_a_judgement() -> None:
    judge, agents = ScriptedEnvironment([RIGHT]), ScriptedAgents([ENDED], delay_s=100)
    results = collect([AgentRecipe().make()], context_of(agents, judge), deadline_s=7)
    assert (results[0].status, texts(results[0]), judge.requests) == ("deadline", ["Q", "AB", "T", "C"], [])
    assert agents.cancelled == 0


def test_a_run_that_cannot_be_ended_in_time_is_cancelled() -> None:
    class Deaf(ScriptedAgents):
        def interrupt(self, rollout_id: str) -> bool:
            return rollout_id in self.running

    deaf = Deaf([ENDED], delay_s=100)
    results = collect([AgentRecipe().make()], context_of(deaf), KEEP_ALL, deadline_s=1)
    assert (results[0].status, results[0].message_log, deaf.cancelled) == ("deadline", [], 1)

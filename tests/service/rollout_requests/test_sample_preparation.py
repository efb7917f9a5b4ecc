"""Samples are checked by their environment and started, from the request to their episodes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.failures import EnvironmentBroken, EnvironmentLost
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest
from rollout_env import StepOutcome
from service.problems import RequestProblem
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.sample_preparation import ANSWERED_WITHIN_S, refuse_bad_extra_env_info, start_samples
from service.rollouts.episode import Episode
from tests import virtual_time
from tests.service.rollout_requests.episode_making import made_episodes
from tests.service.rollouts.playing import error_of
from tests.service.scripted import ScriptedEnvironment
from tests.service.scripted_http import DESCRIPTION, LIMITS, tokenizer

TASKS = {"deal": TaskDescription("deal", "Deals.", {}, has_start=True), "math": TaskDescription("math", "Sums.", {})}
FACTORY = EpisodeFactory(frozenset(TASKS), DESCRIPTION, tokenizer, LIMITS)
QUESTION = {"role": "user", "content": "Q"}
LOG = [{"role": "user", "content": "Q", "token_ids": [1]}]


def start(*texts: str, **fields: Any) -> StepOutcome:
    return StepOutcome([{"role": "user", "content": text} for text in texts], 0.0, False, **fields)


@virtual_time.synchronous
async def episodes_of(
    script: list[StepOutcome | Exception], samples: list[dict[str, Any]], **fields: Any
) -> tuple[list[Episode], list[StepRequest]]:
    """The episodes of the request, and the starts that the environment was asked for."""
    environment = ScriptedEnvironment(script)
    request = RolloutRequest.model_validate({"samples": samples, **fields})
    failures = await start_samples(request, "mine", {"deal"}, {"deal": environment, "math": environment})
    return made_episodes(FACTORY, request, "mine", TASKS, failures), environment.requests


def contents(episode: Episode) -> list[str]:
    return [message.content for message in episode.result().message_log]


def test_all_rollouts_of_a_sample_begin_with_one_start() -> None:
    sample = {"task_name": "deal", "messages": [QUESTION], "extra_env_info": {"seed": 3}, "idx": 7}
    begun = start("Card", metadata={"seed": 3, "card": 5}, next_stop_strings=["!"])
    episodes, [asked] = episodes_of([begun], [sample], num_generations=2)
    assert (asked.is_start, asked.sample, asked.request_id) == (True, 7, "mine")
    assert (asked.message_log, asked.extra_env_info) == ([QUESTION], {"seed": 3})
    assert [contents(episode) for episode in episodes] == [["Q", "Card"]] * 2
    first, second = (episode.result() for episode in episodes)
    assert (first.extra_env_info, first.stop_strings) == ({"seed": 3, "card": 5}, ["!"])
    assert first.extra_env_info is second.extra_env_info


def test_the_prompt_may_be_the_starts_alone() -> None:
    [episode], [asked] = episodes_of([start("One", "Two")], [{"task_name": "deal"}])
    assert asked.message_log == []
    assert contents(episode) == ["One", "Two"]
    assert episode.result().observation_format == "chat"


def test_only_fresh_samples_of_tasks_with_a_start_are_started() -> None:
    samples = [{"task_name": "math", "messages": [QUESTION]}, {"task_name": "deal", "message_log": LOG}]
    episodes, asked = episodes_of([start("Card")], samples)
    assert asked == []
    assert [contents(episode) for episode in episodes] == [["Q"], ["Q"]]


def test_a_start_that_fails_costs_its_sample_alone() -> None:
    samples = [{"task_name": "deal"}, {"task_name": "deal"}]
    lost = EnvironmentLost("The replica died.")
    (failed, played), asked = episodes_of([EnvironmentBroken("A bug."), lost, start("Card")], samples)
    assert error_of(failed.result()) == {"kind": "environment", "message": "A bug.", "retryable": False}
    assert (contents(played), len(asked)) == (["Card"], 3)


def test_a_sample_without_any_message_is_an_error() -> None:
    [episode], _ = episodes_of([start()], [{"task_name": "deal"}])
    message = "The sample has no messages, and its environment's start added none."
    assert error_of(episode.result())["message"] == message


async def test_a_request_that_is_cancelled_cancels_its_starts() -> None:
    cancelled: list[StepRequest] = []

    class Waiting(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(request)
            raise AssertionError

    request = RolloutRequest.model_validate({"samples": [{"task_name": "deal"}] * 2})
    starting = asyncio.create_task(start_samples(request, "mine", {"deal"}, {"deal": Waiting([])}))
    await virtual_time.settled()
    await virtual_time.end_by_cancellation(starting)
    assert len(cancelled) == 2


SEE = "; GET /tasks shows the fields of task 'picky' and an example"


class PickyEnvironment(ScriptedEnvironment):
    """Refuses the fields of the samples at some places."""

    def __init__(self, *refused: RefusedField, answers_after_s: float = 0.0, error: Exception | None = None) -> None:
        super().__init__(script=[])
        self.asked: list[list[dict[str, Any]]] = []
        self._refused = refused
        self._answers_after_s = answers_after_s
        self._error = error

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        self.asked.append(list(extra_env_infos))
        await asyncio.sleep(self._answers_after_s)
        if self._error is not None:
            raise self._error
        return list(self._refused)


def request_of(*extra_env_infos: dict[str, Any], others: int = 0) -> RolloutRequest:
    messages = [{"role": "user", "content": "Hi"}]
    easy = [{"task_name": "easy", "messages": messages}] * others
    picky = [{"task_name": "picky", "messages": messages, "extra_env_info": info} for info in extra_env_infos]
    return RolloutRequest.model_validate({"samples": [*easy, *picky]})


def problems_of(request: RolloutRequest, picky: PickyEnvironment) -> list[FieldProblem]:
    check = refuse_bad_extra_env_info(request, "request", {"easy": PickyEnvironment(), "picky": picky})
    with pytest.raises(RequestProblem) as refusal:
        virtual_time.run(check)
    problem = refusal.value.problem
    assert problem.status == 422
    return list(problem.errors)


def test_a_refused_field_is_named_by_its_place_in_the_request() -> None:
    picky = PickyEnvironment(RefusedField(1, ("rows", 0), "It is no integer"), RefusedField(1, (), "It is no board"))
    assert problems_of(request_of({"rows": [1]}, {"rows": ["x"]}, others=3), picky) == [
        FieldProblem(field="samples[4].extra_env_info.rows[0]", message=f"It is no integer{SEE}"),
        FieldProblem(field="samples[4].extra_env_info", message=f"It is no board{SEE}"),
    ]
    assert picky.asked == [[{"rows": [1]}, {"rows": ["x"]}]]


def test_several_environments_refuse_with_at_most_20_problems() -> None:
    environments = {
        "easy": PickyEnvironment(*[RefusedField(0, ("a", place), "wrong") for place in range(15)]),
        "picky": PickyEnvironment(*[RefusedField(0, ("b", place), "wrong") for place in range(15)]),
    }
    request = request_of({"b": [0] * 15}, others=1)
    request.samples[0].extra_env_info = {"a": [0] * 15}
    with pytest.raises(RequestProblem) as refusal:
        virtual_time.run(refuse_bad_extra_env_info(request, "request", environments))
    assert [problem.field for problem in refusal.value.problem.errors] == [
        *(f"samples[0].extra_env_info.a[{place}]" for place in range(15)),
        *(f"samples[1].extra_env_info.b[{place}]" for place in range(5)),
    ]


@pytest.mark.parametrize(
    ("picky", "why"),
    [
        (PickyEnvironment(error=EnvironmentLost("The replica died.")), "The replica died."),
        (
            PickyEnvironment(answers_after_s=3600),
            f"The check of the samples by task 'picky' took longer than {ANSWERED_WITHIN_S:g} s.",
        ),
    ],
)
def test_an_environment_that_does_not_answer_refuses_nothing_and_is_logged(
    picky: PickyEnvironment, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    virtual_time.run(refuse_bad_extra_env_info(request_of({}), "request", {"picky": picky}))
    [record] = caplog.records
    assert record.getMessage() == f"An environment did not answer: {why}"
    assert (vars(record)["request_id"], vars(record)["task_name"]) == ("request", "picky")

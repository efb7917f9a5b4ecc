"""`client.rejudge` against the application: environments judge rollouts that they, or others, have judged before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from deployments.failures import EnvironmentLost, SessionLost
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.replicas import GeneratorDescription
from deployments.tasks.sliding_puzzle import SlidingPuzzleEnvironment
from rollout_client import RejudgedRollout, Rejudgement, RequestRejected, SampleInput, SampleResult
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment
from rollout_env.steps import validated_step
from service.settings import RequestLimits
from tests.service import scripted_http
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator
from tests.service.scripted_http import ScriptedHttp

LIMITS = RequestLimits(max_body_bytes=2**20, max_rollouts_per_request=100)
CHANGES_INFO = (
    "its environment changes extra_env_info in its steps, and a result has it as the last step has left it: "
    "give the samples that were played"
)


class Answer(BaseModel):
    ground_truth: str = "4"


class SumEnvironment(TaskEnvironment):
    """One turn, whose answer is right or wrong."""

    ExtraEnvInfo = Answer

    def __init__(self, right: float = 1.0, wrong: float = 0.0) -> None:
        self.right, self.wrong = right, wrong

    def step(self, message_log: list[ChatMessage], extra_env_info: Answer) -> StepOutcome:
        is_right = message_log[-1]["content"] == extra_env_info.ground_truth
        return StepOutcome({"role": "environment", "content": ""}, self.right if is_right else self.wrong, True)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        message = {"role": "user", "content": "2+2?"}
        return [{"messages": [message], "extra_env_info": {"ground_truth": "4"}} for _ in range(count)]


class Asked(BaseModel):
    asked: list[str] = []


class MarkingEnvironment(SumEnvironment):
    """Judges each rollout once: as part of its state it notes that it has, and finds nothing more to judge."""

    ExtraEnvInfo = Asked  # type: ignore[assignment]

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        reward = 0.0 if extra_env_info.asked else 1.0
        return StepOutcome({"role": "user", "content": ""}, reward, True, metadata={"asked": ["judge"]})

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": "2+2?"}], "extra_env_info": {}} for _ in range(count)]


class TalkingEnvironment(SumEnvironment):
    """Says its words one after the other, a reward of 1/2 each, and ends with the last one or never."""

    def __init__(self, *words: str, ends: bool = True) -> None:
        self.words, self.ends = words, ends

    def step(self, message_log: list[ChatMessage], extra_env_info: Answer) -> StepOutcome:
        turn = sum(message["role"] == "assistant" for message in message_log)
        observation: ChatMessage = {"role": "user", "content": self.words[turn - 1]}
        return StepOutcome(observation, {"said": 0.5}, self.ends and turn == len(self.words))


@dataclass
class Hosted(ScriptedEnvironment):
    """The port of the rollout loop over an environment."""

    script: Sequence[Any] = ()
    environment: TaskEnvironment = field(default_factory=SumEnvironment)
    name: str = "math"
    failures: dict[int, Exception] = field(default_factory=dict)
    """By the turn of the step, from 0."""
    refused: Callable[[dict[str, Any]], str | None] = lambda _info: None

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        if request.turn in self.failures:
            raise self.failures[request.turn]
        return await validated_step(self.environment, request.message_log, request.extra_env_info)

    async def describe(self) -> TaskDescription:
        [example] = self.environment.example_samples(1, seed=0)
        return TaskDescription(self.name, "A task.", fields={}, example={"task_name": self.name, **example})

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        found = [(place, self.refused(info)) for place, info in enumerate(extra_env_infos)]
        return [RefusedField(place, ("ground_truth",), said) for place, said in found if said]


class Service(ScriptedHttp):
    """Plays and judges; `math` and `sliding_puzzle` are the environments that a test gives it."""

    def __init__(self, environment: TaskEnvironment, *said: str) -> None:
        super().__init__(LIMITS, generator=ScriptedGenerator(said or ["4"]))
        for name in self.environments:
            self.environments[name] = Hosted(environment=environment, name=name)

    def set(self, environment: TaskEnvironment, **fields: Any) -> Hosted:
        """The environment of `math` as it is from now on."""
        hosted = self.environments["math"] = Hosted(environment=environment, **fields)
        return hosted

    def play(self, samples: list[dict[str, Any]], **options: Any) -> list[SampleResult]:
        return self.call(lambda client: client.rollout(samples, **options)).samples

    def rejudge(self, rollouts: Sequence[SampleResult], *arguments: Any, **options: Any) -> Rejudgement:
        """Generates nothing."""
        before = len(self.generator.requests)
        found = self.call(lambda client: client.rejudge(rollouts, *arguments, **options))
        assert len(self.generator.requests) == before
        assert [rollout.sample for rollout in found.rollouts] == list(rollouts)
        return found


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_http, "DESCRIPTION", GeneratorDescription("tiny", 4000, scripted_http.VOCAB_SIZE))


def asked(ground_truth: str = "4", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "2+2?"}]
    return {"task_name": "math", "messages": messages, "extra_env_info": {"ground_truth": ground_truth}} | fields


def seen(rollout: RejudgedRollout) -> tuple[Any, ...]:
    return rollout.old, rollout.new, rollout.difference


def test_a_changed_environment_gives_each_rollout_another_reward_and_both_sums() -> None:
    service = Service(SumEnvironment())
    rollouts = service.play([asked(), asked("5"), asked()])
    service.set(SumEnvironment(right=0.5, wrong=-1.0))
    found = service.rejudge(rollouts)
    assert list(map(seen, found.rollouts)) == [(1.0, 0.5, -0.5), (0.0, -1.0, -1.0), (1.0, 0.5, -0.5)]
    assert (found.old_sum, found.new_sum, len(found.changed), found.not_judged) == (2.0, 0.0, 3, {})
    assert [rollout.rewards for rollout in found.rollouts] == [{"reward": 0.5}, {"reward": -1.0}, {"reward": 0.5}]


def test_another_task_may_judge_and_one_that_is_not_there_is_an_error() -> None:
    service = Service(SumEnvironment())
    rollouts = service.play([asked()])
    service.environments["sliding_puzzle"] = Hosted(environment=SumEnvironment(right=7.0))
    [rollout] = service.rejudge(rollouts, "sliding_puzzle").rollouts
    assert (rollout.task_name, *seen(rollout)) == ("sliding_puzzle", 1.0, 7.0, 6.0)
    with pytest.raises(RequestRejected, match="there is no task 'maths'"):
        service.rejudge(rollouts, "maths")


def test_a_rollout_whose_environment_failed_gets_its_reward_and_is_in_no_sum() -> None:
    service = Service(SumEnvironment())
    service.set(SumEnvironment(), failures={0: EnvironmentLost("The judge is away.")})
    rollouts = service.play([asked()], sample_retries=0)
    assert rollouts[0].status == "error"
    service.set(SumEnvironment())
    found = service.rejudge(rollouts)
    assert list(map(seen, found.rollouts)) == [(None, 1.0, None)]
    assert (found.compared, found.old_sum, found.new_sum) == ([], 0.0, 0.0)


actions = st.lists(st.sampled_from(["up", "down", "left", "right", "view", "jump"]), min_size=1, max_size=8)


@given(actions, st.integers(0, 99))
def test_several_turns_of_a_pure_environment_give_the_rewards_that_they_gave(said: list[str], seed: int) -> None:
    puzzles = SlidingPuzzleEnvironment()
    service = Service(puzzles, *(f"<action>{action}</action>" for action in said))
    samples = [{"task_name": "sliding_puzzle", **sample} for sample in puzzles.example_samples(2, seed)]
    rollouts = service.play(samples, num_generations=2, max_rollout_turns=5)
    given = [SampleInput.model_validate(sample) for sample in samples]
    found = service.rejudge(rollouts, samples=given)
    assert [(rollout.old, rollout.new, rollout.reason) for rollout in found.rollouts] == [
        (rollout.total_reward, rollout.total_reward, None) for rollout in rollouts
    ]
    assert [rollout.turns for rollout in found.rollouts] == [rollout.metrics.turn_count for rollout in rollouts]
    assert [dict(rollout.rewards) for rollout in found.rollouts] == [rollout.rewards for rollout in rollouts]


@pytest.mark.parametrize("environment", [SlidingPuzzleEnvironment(), MarkingEnvironment()], ids=["turns", "one turn"])
def test_an_environment_with_a_state_needs_the_samples_that_were_played(environment: TaskEnvironment) -> None:
    service = Service(environment, "<action>up</action>")
    samples = [{"task_name": "math", **sample} for sample in environment.example_samples(2, 1)]
    rollouts = service.play(samples, max_rollout_turns=1)
    assert service.rejudge(rollouts).not_judged == {CHANGES_INFO: 2}
    assert service.rejudge(rollouts, samples=samples).not_judged == {}


def test_an_environment_without_a_state_is_judged_over_several_turns_without_the_samples() -> None:
    service = Service(TalkingEnvironment("Go on.", "Well done."))
    rollouts = service.play([asked()])
    found = service.rejudge(rollouts)
    assert [(*seen(rollout), rollout.turns) for rollout in found.rollouts] == [(1.0, 1.0, 0.0, 2)]


@pytest.mark.parametrize(
    ("environment", "new", "turns", "reason"),
    [
        (TalkingEnvironment("Stop.", "Well done."), None, 1, "answers turn 1 otherwise now"),
        (TalkingEnvironment("Go on."), 0.5, 1, None),
        (
            TalkingEnvironment("Go on.", "Well done.", ends=False),
            None,
            2,
            "does not end it, so its reward is not final",
        ),
    ],
    ids=["another observation", "ends sooner", "does not end"],
)
def test_turns_count_only_where_they_would_have_been_played(
    environment: TaskEnvironment, new: float | None, turns: int, reason: str | None
) -> None:
    service = Service(TalkingEnvironment("Go on.", "Well done."))
    rollouts = service.play([asked()])
    service.set(environment)
    [rollout] = service.rejudge(rollouts).rollouts
    assert (rollout.old, rollout.new, rollout.turns) == (1.0, new, turns)
    assert (reason is None) == (rollout.reason is None)
    assert (reason or "") in (rollout.reason or "")


def test_a_rollout_that_its_turns_have_ended_need_not_be_ended_by_its_environment() -> None:
    service = Service(TalkingEnvironment("Go on.", "Go on.", "Well done."))
    rollouts = service.play([asked()], max_rollout_turns=2)
    assert list(map(seen, service.rejudge(rollouts).rollouts)) == [(1.0, 1.0, 0.0)]


def test_a_stateful_environment_is_said_to_have_lost_its_session() -> None:
    service = Service(TalkingEnvironment("Go on.", "Well done."))
    rollouts = service.play([asked()])
    service.set(
        TalkingEnvironment("Go on.", "Well done."), failures={1: SessionLost("The session of the rollout is gone.")}
    )
    found = service.rejudge(rollouts)
    assert found.not_judged == {"turn 2 was not judged: environment error: The session of the rollout is gone.": 1}


def test_a_rollout_that_the_environment_refuses_now_does_not_keep_the_others_from_being_judged() -> None:
    service = Service(SumEnvironment())
    rollouts = service.play([asked(), asked("old"), asked()])
    service.set(SumEnvironment(), refused=lambda info: "Too old" if info["ground_truth"] == "old" else None)
    found = service.rejudge(rollouts)
    assert [rollout.new for rollout in found.rollouts] == [1.0, None, 1.0]
    [reason] = found.not_judged
    assert reason.startswith("extra_env_info.ground_truth: Too old")


def test_what_was_not_judged_turn_by_turn_is_not_judged_again() -> None:
    service = Service(TalkingEnvironment("Go on.", "Well done."))
    [played] = service.play([asked()])
    prompt, first, *others = played.message_log
    agents = played.model_copy(update={"message_log": [prompt, first.model_copy(update={"reward": None}), *others]})
    cut = played.model_copy(update={"message_log": [prompt, first.model_copy(update={"finish_reason": None})]})
    empty = played.model_copy(update={"message_log": [prompt]})
    assert service.rejudge([agents, cut, empty]).not_judged == {
        "not every response of it was judged by itself, as in the run of an agent": 1,
        "a response of it is not complete: it was interrupted": 1,
        "it has no response": 1,
    }
    assert service.generator.requests[2:] == []


def test_a_resumed_rollout_counts_with_the_rewards_of_all_of_its_turns() -> None:
    service = Service(TalkingEnvironment("Go on.", "Well done."))
    [begun] = service.play([asked()], max_rollout_turns=1)
    resumed = asked() | {"message_log": [message.model_dump(exclude_unset=True) for message in begun.message_log]}
    del resumed["messages"]
    rollouts = service.play([resumed])
    assert rollouts[0].total_reward == 0.5
    assert list(map(seen, service.rejudge(rollouts).rollouts)) == [(1.0, 1.0, 0.0)]


@pytest.mark.parametrize(
    ("fields", "given", "reason"),
    [
        ({"id": "a"}, asked("5", id="b"), "none of the given samples has its row, id or idx"),
        ({}, asked("5", idx=3), "none of the given samples has its row, id or idx"),
        ({"id": "a"}, asked("5", id="a"), None),
        ({"idx": 3}, asked("5", idx=3), None),
        ({"input_row": 0}, asked("5"), None),
        ({"input_row": 4}, asked("5"), "none of the given samples has its row, id or idx"),
        ({}, asked("5", task_name="code"), "the given sample of its row, id or idx has another task or prompt"),
        ({}, asked("5", messages=[{"role": "user", "content": "1+1?"}]), "the given sample of its row, id or idx"),
    ],
)
def test_the_sample_of_a_rollout_is_found_by_row_id_or_idx_and_must_be_its_own(
    fields: dict[str, Any], given: dict[str, Any], reason: str | None
) -> None:
    service = Service(SumEnvironment())
    rollouts = service.play([asked(**fields)])
    [rollout] = service.rejudge(rollouts, samples=[given]).rollouts
    assert rollout.new == (0.0 if reason is None else None)
    assert (rollout.reason or "").startswith(reason or "")


@pytest.mark.parametrize(("limit", "value", "requests"), [("ROLLOUTS", 2, 3), ("TOKENS", 100, 3), ("TOKENS", 1, 5)])
def test_more_rollouts_than_a_request_holds_are_judged_in_several(
    limit: str, value: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"rollout_client.calls.rejudge.{limit}_PER_REQUEST", value)
    service = Service(TalkingEnvironment("Go on.", "Well done."))
    rollouts = service.play([asked()] * 5)
    hosted = service.set(TalkingEnvironment("Go on.", "Well done."))
    assert [rollout.new for rollout in service.rejudge(rollouts).rollouts] == [1.0] * 5
    assert len({request.request_id for request in hosted.requests}) == 1 + 2 * requests

"""`check`: an environment without fault passes; for each rule, one that breaks just this rule is found."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from rollout_env import ChatMessage, CheckFailed, Finding, Session, StartOutcome, StepOutcome, TaskEnvironment, check
from rollout_env.check import AWKWARD_REPLIES, MANY_SAMPLES
from tests.clients.rollout_env.counting_environment import Count, CountingEnvironment, counting_sample

FIRST = "Sample 0, turn 1, reply ''"
STATE = (
    "when two rollouts were played at once, compared with one after the other. Keep the state of a rollout in "
    "metadata, not in the environment; pass repeatable=False if steps are random on purpose."
)


def findings_of(environment: TaskEnvironment | Callable[[], TaskEnvironment], **arguments: Any) -> list[Finding]:
    with pytest.raises(CheckFailed) as failure:
        check(environment, **arguments)
    return failure.value.findings


def test_an_environment_without_fault_passes() -> None:
    check(CountingEnvironment)
    check(CountingEnvironment())
    check(CountingEnvironment, replies=["1", "2"], samples=[counting_sample(3)])


def test_every_sample_is_played_with_awkward_replies_and_with_its_own() -> None:
    replies: list[str] = []

    class Listening(CountingEnvironment):
        async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
            replies.append(message_log[-1]["content"])
            return await super().step(message_log, extra_env_info)

    def counted(sample: Any) -> list[str]:
        return [str(number + 1) for number in range(sample["extra_env_info"]["until"])]

    check(Listening, counted, samples=2, repeatable=False)
    assert replies == [*AWKWARD_REPLIES, "1", "2", *AWKWARD_REPLIES, "1", "2", "3"]


def test_rollouts_of_different_lengths_are_compared_to_the_end_of_each() -> None:
    check(CountingEnvironment, replies=lambda sample: ["1"] * (sample["extra_env_info"]["until"] - 1), samples=2)
    check(CountingEnvironment, replies=["1"] * 9, samples=2)


def test_the_failure_lists_all_findings() -> None:
    class TwoFaults(CountingEnvironment):
        async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
            raise KeyError("board")

        def close(self) -> None:
            raise OSError("The file is closed.")

    with pytest.raises(CheckFailed) as failure:
        check(TwoFaults)
    lines = str(failure.value).splitlines()
    assert lines[:3] == [
        "The environment breaks rules of the service.",
        f"- step: {FIRST}: step raised KeyError: 'board'.",
        "    Traceback (most recent call last):",
    ]
    assert [line for line in lines if line.startswith("- ")][1:] == [
        "- close: close raised OSError: The file is closed."
    ]
    assert [line for line in lines if "File" in line and "test_check.py" not in line] == []
    assert '        raise KeyError("board")' in lines


def test_what_makes_no_environment_is_refused() -> None:
    with pytest.raises(TypeError, match=r"such as its class; got 'my_package:Echo'\.$"):
        check("my_package:Echo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"description": " "}, "description: String should have at least 1 character."),
        ({"ExtraEnvInfo": dict}, "ExtraEnvInfo: Input should be a subclass of BaseModel."),
        ({"lost_session": "retry"}, "lost_session: Input should be 'restart', 'reopen' or 'fail'."),
        ({"max_sessions": 0}, "max_sessions: Input should be greater than 0."),
        ({"max_concurrent_steps": True}, "max_concurrent_steps: Input should be a valid integer."),
        ({"tools": [1]}, "tools.0: Input should be a valid dictionary."),
        ({"session_idle_s": 0}, "session_idle_s: Input should be greater than 0."),
    ],
)
def test_attributes_that_are_not_valid_are_found(attributes: dict[str, Any], message: str) -> None:
    faulty = type("Faulty", (CountingEnvironment,), attributes)
    assert findings_of(faulty) == [Finding("attributes", message)]


def test_extra_env_info_without_a_json_schema_is_found() -> None:
    class Unwritable(BaseModel):
        judge: Callable[[str], bool] | None = None

    [found] = findings_of(type("Faulty", (CountingEnvironment,), {"ExtraEnvInfo": Unwritable}))
    assert found.rule == "attributes"
    assert found.message.startswith("ExtraEnvInfo has no JSON schema, which GET /tasks shows: ")


TWO, THREE, FOUR = (counting_sample(until) for until in (2, 3, 4))


class Listed(CountingEnvironment):
    """Has the samples of a function."""

    def __init__(self, samples: Callable[[int, int], list[dict[str, Any]]]) -> None:
        self.samples = samples

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return self.samples(count, seed)


def faulty_examples(*answers: list[dict[str, Any]]) -> Listed:
    """Gives the answers in turn; a large request has no fault."""
    few = itertools.cycle(answers)
    return Listed(
        lambda count, seed: next(few) if count < MANY_SAMPLES else CountingEnvironment().example_samples(count, seed)
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (faulty_examples([TWO, THREE], [TWO, FOUR]), "(2, seed=0) returned different samples the second time."),
        (faulty_examples([TWO, THREE, FOUR]), "(2, seed=0) returned 3 samples."),
        (faulty_examples([TWO, TWO]), "(2, seed=0) returned only 1 different samples."),
        (
            Listed(lambda count, seed: [TWO, THREE, FOUR][:count] if seed == 0 else [FOUR, THREE, TWO][:count]),
            "(64, seed=0) returned 3 samples; repeat them where there are no more.",
        ),
        (
            Listed(lambda count, _: [counting_sample(2 + place % 8) for place in range(count)]),
            "(64, seed=0) returned the same samples as with seed 1; choose or order them by the seed.",
        ),
    ],
)
def test_example_samples_that_are_not_as_asked_for_are_found(environment: Listed, message: str) -> None:
    assert findings_of(environment, samples=2) == [Finding("example_samples", f"example_samples{message}")]


def test_one_of_many_example_samples_that_cannot_be_posted_is_found() -> None:
    def one_wrong(count: int, seed: int) -> list[dict[str, Any]]:
        samples = [counting_sample(seed + 2 + place) for place in range(count)]
        return [*samples[:40], *([{**TWO, "score": float("nan")}] if count > 40 else []), *samples[41:]]

    assert findings_of(lambda: Listed(one_wrong)) == [
        Finding(
            "example_samples",
            "sample 40 of example_samples(64, seed=0) is not a sample: it is not JSON: sample: Value error, it holds "
            "nan, which JSON cannot express.",
        )
    ]


def test_a_few_samples_may_be_the_same_for_another_seed() -> None:
    check(lambda: Listed(lambda count, _: [TWO] * count), samples=1)
    check(lambda: Listed(lambda count, _: [counting_sample(2 + place % 7) for place in range(count)]))


def test_example_samples_that_raise_are_found() -> None:
    class Raising(CountingEnvironment):
        def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
            raise FileNotFoundError("words.txt")

    assert findings_of(Raising) == [Finding("example_samples", "example_samples raised FileNotFoundError: words.txt.")]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"extra_env_info": {"until": "soon"}},
            "ExtraEnvInfo does not accept it: extra_env_info.until: "
            "Input should be a valid integer, unable to parse string as an integer.",
        ),
        ({"messages": None}, "The sample has no prompt: give it messages, at least one."),
        ({"score": float("nan")}, "it is not JSON: sample: Value error, it holds nan, which JSON cannot express."),
        ({"tags": {"a"}}, "it is not JSON: sample.tags: input was not a valid JSON value."),
    ],
)
def test_a_sample_that_cannot_be_posted_is_found(fault: dict[str, Any], message: str) -> None:
    assert findings_of(faulty_examples([TWO, THREE | fault]), samples=2) == [Finding("sample", f"Sample 1: {message}")]


class FaultyStep(CountingEnvironment):
    """Changes its outcomes."""

    def __init__(self, fault: Callable[[StepOutcome], Any]) -> None:
        self.fault = fault

    async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        changed: StepOutcome = self.fault(await super().step(message_log, extra_env_info))
        return changed


def with_fields(**fields: Any) -> Callable[[StepOutcome], StepOutcome]:
    return lambda outcome: replace(outcome, **fields)


@pytest.mark.parametrize(
    ("fault", "rule", "message"),
    [
        (lambda _: None, "outcome", "step must return a StepOutcome, got NoneType."),
        (with_fields(metadata={"until": {3}}), "outcome", "outcome.metadata.until: input was not a valid JSON value."),
        (
            with_fields(metadata={"board": []}),
            "metadata",
            "the next step would not accept it as extra_env_info: ExtraEnvInfo does not accept it: "
            "extra_env_info.until: Field required.",
        ),
    ],
)
def test_an_outcome_with_one_fault_is_found(fault: Any, rule: str, message: str) -> None:
    [found] = findings_of(lambda: FaultyStep(fault))
    assert found.rule == rule
    assert found.message.startswith(f"{FIRST}: ")
    assert found.message.endswith(f": {message}")


def test_metadata_of_the_last_step_need_not_be_a_state() -> None:
    check(lambda: FaultyStep(with_fields(terminated=True, metadata={"won": True})))


def test_a_step_that_raises_is_found_once_with_its_first_place() -> None:
    class Raising(CountingEnvironment):
        async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
            if extra_env_info.until == 3 and extra_env_info.count == 1:
                raise ZeroDivisionError("division by zero")
            return await super().step(message_log, extra_env_info)

    assert findings_of(Raising, replies=["a" * 41, "b" * 41], samples=3) == [
        Finding("step", f"Sample 1, turn 2, reply '{'b' * 40}'...: step raised ZeroDivisionError: division by zero.")
    ]


def test_a_step_that_does_not_end_is_found() -> None:
    class Endless(CountingEnvironment):
        async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
            await asyncio.Event().wait()
            raise AssertionError

    assert findings_of(Endless, samples=1, step_timeout_s=0.05) == [
        Finding("step", f"{FIRST}: the step took longer than 0.05 s.")
    ]


@pytest.mark.slow
def test_a_step_that_blocks_the_event_loop_is_found() -> None:
    class Blocking(CountingEnvironment):
        async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
            time.sleep(0.2)  # noqa: ASYNC251 - the fault under test
            return await super().step(message_log, extra_env_info)

    assert findings_of(Blocking, samples=1, max_block_s=0.1) == [
        Finding(
            "blocking",
            f"{FIRST}: the step blocked the event loop for more than 0.1 s, during which no other step could run. "
            "Await what takes long, or run it by asyncio.to_thread.",
        )
    ]


class OneGameAtATime(CountingEnvironment):
    """Keeps the count of a rollout in itself; each rollout begins anew with its first turn."""

    def __init__(self) -> None:
        self.count = 0

    async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        self.count = 1 if len(message_log) == 2 else self.count + 1
        return await super().step(message_log, extra_env_info.model_copy(update={"count": self.count - 1}))


class AGameEach(CountingEnvironment):
    """Keeps the count of each rollout in itself, by its prompt."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        prompt = message_log[0]["content"]
        self.counts[prompt] = 1 if len(message_log) == 2 else self.counts[prompt] + 1
        return await super().step(message_log, extra_env_info.model_copy(update={"count": self.counts[prompt] - 1}))


def test_state_that_two_rollouts_share_is_found() -> None:
    samples = [counting_sample(3), counting_sample(5)]
    assert findings_of(OneGameAtATime(), replies=["1", "2"], samples=samples) == [
        Finding("state", f"Sample 1, turn 2: its observation, reward, metadata differed {STATE}")
    ]


def test_state_that_another_replica_does_not_have_is_found() -> None:
    samples = [counting_sample(3), counting_sample(5)]
    check(AGameEach(), replies=["1", "2"], samples=samples)
    assert findings_of(AGameEach, replies=["1", "2"], samples=samples) == [
        Finding("state", f"Sample 0, turn 2: step raised KeyError: 'Count to 3.' {STATE}")
    ]


def test_steps_that_are_random_are_found_unless_they_are_so_on_purpose() -> None:
    class Random(CountingEnvironment):
        async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
            return replace(await super().step(message_log, extra_env_info), reward=random.random())

    assert findings_of(Random) == [Finding("state", f"Sample 0, turn 1: its reward differed {STATE}")]
    check(Random, repeatable=False)


def test_all_instances_are_closed_and_a_close_that_raises_is_found() -> None:
    made: list[CountingEnvironment] = []

    class Closing(CountingEnvironment):
        closed = False

        def __init__(self) -> None:
            made.append(self)

        async def close(self) -> None:
            await asyncio.sleep(0)
            self.closed = True
            raise OSError("Nothing to close.")

    assert findings_of(Closing) == [Finding("close", "close raised OSError: Nothing to close.")]
    assert [vars(environment) for environment in made] == [{"closed": True}, {"closed": True}]


class Starting(CountingEnvironment):
    """Starts with an outcome of `begin`."""

    def __init__(self, begin: Callable[[], StartOutcome] = lambda: StartOutcome({"role": "user", "content": "Go."})):
        self.begin = begin

    def start(self, message_log: list[ChatMessage], extra_env_info: Count) -> StartOutcome:
        return self.begin()

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"extra_env_info": {"until": until}} for until in range(seed + 2, seed + 2 + count)]


def test_an_environment_with_a_start_passes_also_without_prompts() -> None:
    check(Starting)


@pytest.mark.parametrize(
    ("begin", "rule", "message"),
    [
        (
            lambda: StartOutcome({"role": "user", "content": f"{random.random()}"}),
            "start",
            "start returned something else the second time: seed what is random by a field of extra_env_info.",
        ),
        (lambda: dict[str, StartOutcome]()["board"], "start", "start raised KeyError: 'board'."),
        (
            lambda: StartOutcome({"role": "user", "content": "Go."}, metadata={"count": 1}),
            "metadata",
            "the next step would not accept it as extra_env_info: ExtraEnvInfo does not accept it: "
            "extra_env_info.until: Field required.",
        ),
        (StartOutcome, "start", "start raised ValueError: The sample has no prompt: give it messages, at least one."),
    ],
)
def test_a_start_that_is_not_seeded_raises_or_makes_no_state_is_found(begin: Any, rule: Any, message: str) -> None:
    assert findings_of(lambda: Starting(begin)) == [Finding(rule, f"Sample 0: {message}")]


def test_an_environment_without_a_step_is_found() -> None:
    class Stepless(TaskEnvironment):
        description = "Nothing."
        ExtraEnvInfo = Count

        def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
            raise NotImplementedError

    assert findings_of(Stepless) == [
        Finding("attributes", "it implements neither step nor step_batch nor open_session.")
    ]


class CountInMemory(Session):
    def __init__(self, count: int) -> None:
        self.count = count

    def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        self.count += 1
        done = self.count == extra_env_info.until
        return StepOutcome({"role": "user", "content": f"{self.count}"}, 1.0, done)


class InSessions(CountingEnvironment):
    def open_session(self, message_log: list[ChatMessage], extra_env_info: Count) -> Session:
        return CountInMemory(0)


def test_state_in_a_session_is_no_fault() -> None:
    check(InSessions)


def test_a_session_that_is_not_opened_again_where_it_stood_is_found() -> None:
    class Forgetful(InSessions):
        lost_session = "reopen"

    class Replaying(Forgetful):
        def open_session(self, message_log: list[ChatMessage], extra_env_info: Count) -> Session:
            return CountInMemory(sum(message["role"] == "assistant" for message in message_log))

    check(Replaying)
    [finding] = findings_of(Forgetful)
    assert finding.rule == "state"
    assert finding.message == f"Sample 0, turn 2: its observation, terminated differed {STATE}"


def test_a_session_that_does_not_close_is_found() -> None:
    class Stuck(CountInMemory):
        def close(self) -> None:
            raise OSError("It is stuck.")

    class Sticking(InSessions):
        def open_session(self, message_log: list[ChatMessage], extra_env_info: Count) -> Session:
            return Stuck(0)

    assert findings_of(Sticking) == [Finding("close", "close of a session raised OSError: It is stuck.")]

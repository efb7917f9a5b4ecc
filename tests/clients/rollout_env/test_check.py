"""`check`: an environment without fault passes; for each rule, one that breaks just this rule is found."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from rollout_env import ChatMessage, CheckFailed, Session, StartOutcome, StepOutcome, TaskEnvironment, check
from rollout_env.check import AWKWARD_REPLIES, MANY_SAMPLES
from tests.clients.rollout_env.counting_environment import Count, CountingEnvironment, counting_sample

FIRST = "Sample 0, turn 1, reply ''"
STATE = (
    "when two rollouts were played at once, compared with one after the other. Keep the state of a rollout in "
    "metadata, not in the environment; pass repeatable=False if steps are random on purpose."
)
GO: ChatMessage = {"role": "user", "content": "Go."}


def findings_of(environment: TaskEnvironment | Callable[[], TaskEnvironment], **arguments: Any) -> list[str]:
    """Each with its rule."""
    with pytest.raises(CheckFailed) as failure:
        check(environment, **arguments)
    return [f"{finding.rule}: {finding.message}" for finding in failure.value.findings]


def with_methods(base: type = CountingEnvironment, **methods: Any) -> Any:
    """A class with these methods in place of those of `base`."""
    return type("Changed", (base,), methods)


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


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
    async def step(*_: Any) -> StepOutcome:
        raise KeyError("board")

    with pytest.raises(CheckFailed) as failure:
        check(with_methods(step=step, close=raising(OSError("The file is closed."))))
    lines = str(failure.value).splitlines()
    assert lines[:3] == [
        "The environment breaks rules of the service.",
        f"- step: {FIRST}: step raised KeyError: 'board'.",
        "    Traceback (most recent call last):",
    ]
    _, of_close = (line for line in lines if line.startswith("- "))
    assert of_close == "- close: close raised OSError: The file is closed."
    assert [line for line in lines if "File" in line and "test_check.py" not in line] == []
    assert '        raise KeyError("board")' in lines


def test_extra_env_info_without_a_json_schema_is_found() -> None:
    class Unwritable(BaseModel):
        judge: Callable[[str], bool] | None = None

    [found] = findings_of(with_methods(ExtraEnvInfo=Unwritable))
    assert found.startswith("attributes: ExtraEnvInfo has no JSON schema, which GET /tasks shows: ")


TWO, THREE, FOUR = (counting_sample(until) for until in (2, 3, 4))


def listed(samples: Callable[[int, int], list[dict[str, Any]]]) -> CountingEnvironment:
    """An environment with the samples of a function."""
    environment: CountingEnvironment = with_methods(example_samples=lambda _, count, seed: samples(count, seed))()
    return environment


def faulty_examples(*answers: list[dict[str, Any]]) -> CountingEnvironment:
    """Gives the answers in turn; a large request has no fault."""
    few = itertools.cycle(answers)
    return listed(
        lambda count, seed: next(few) if count < MANY_SAMPLES else CountingEnvironment().example_samples(count, seed)
    )


def test_a_few_samples_may_be_the_same_for_another_seed() -> None:
    check(lambda: listed(lambda count, _: [TWO] * count), samples=1)
    check(lambda: listed(lambda count, _: [counting_sample(2 + place % 7) for place in range(count)]))


def faulty_step(fault: Callable[[StepOutcome], Any]) -> Any:
    """Changes the outcomes of its steps."""

    async def step(self: Any, message_log: list[ChatMessage], extra_env_info: Count) -> Any:
        return fault(await CountingEnvironment.step(self, message_log, extra_env_info))

    return with_methods(step=step)


def with_fields(**fields: Any) -> Callable[[StepOutcome], StepOutcome]:
    return lambda outcome: replace(outcome, **fields)


def test_metadata_of_the_last_step_need_not_be_a_state() -> None:
    check(faulty_step(with_fields(terminated=True, metadata={"won": True})))


def one_fault(outcome: StepOutcome) -> StepOutcome:
    if outcome.metadata == {"until": 3, "count": 2}:
        raise ZeroDivisionError("division by zero")
    return outcome


async def endless(*_: Any) -> StepOutcome:
    await asyncio.Event().wait()
    raise AssertionError


def with_random_reward(outcome: StepOutcome) -> StepOutcome:
    return replace(outcome, reward=random.random())


def test_steps_may_be_random_on_purpose() -> None:
    check(faulty_step(with_random_reward), repeatable=False)


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


def test_all_instances_are_closed_and_a_close_that_raises_is_found() -> None:
    closed: list[CountingEnvironment] = []

    async def close(self: CountingEnvironment) -> None:
        await asyncio.sleep(0)
        closed.append(self)
        raise OSError("Nothing to close.")

    assert findings_of(with_methods(close=close)) == ["close: close raised OSError: Nothing to close."]
    assert len(set(closed)) == len(closed) == 2


class Starting(CountingEnvironment):
    """Starts with an outcome of `begin`."""

    def __init__(self, begin: Callable[[], StartOutcome] = lambda: StartOutcome(GO)):
        self.begin = begin

    def start(self, message_log: list[ChatMessage], extra_env_info: Count) -> StartOutcome:
        return self.begin()

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"extra_env_info": {"until": until}} for until in range(seed + 2, seed + 2 + count)]


def test_an_environment_with_a_start_passes_also_without_prompts() -> None:
    check(Starting)


class CountInMemory(Session):
    def __init__(self, count: int) -> None:
        self.count = count

    def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        self.count += 1
        done = self.count == extra_env_info.until
        return StepOutcome({"role": "user", "content": f"{self.count}"}, 1.0, done)


def in_sessions(session_of: Callable[[list[ChatMessage]], Session], **fields: Any) -> Any:
    return with_methods(open_session=lambda _, message_log, __: session_of(message_log), **fields)


def replayed(log: list[ChatMessage]) -> Session:
    return CountInMemory(sum(message["role"] == "assistant" for message in log))


def test_state_may_be_kept_where_each_step_of_its_rollout_finds_it() -> None:
    check(in_sessions(replayed, lost_session="reopen"))
    check(in_sessions(lambda _: CountInMemory(0)))
    check(AGameEach(), **TWO_GAMES)


# What breaks one rule


STUCK = with_methods(CountInMemory, close=raising(OSError("It is stuck.")))
TWO_GAMES: dict[str, Any] = {"replies": ["1", "2"], "samples": [counting_sample(3), counting_sample(5)]}
NOT_VALID = f"outcome: {FIRST}: The environment's outcome is not valid"
NOT_ACCEPTED = "ExtraEnvInfo does not accept it: extra_env_info.until:"
NO_STATE = f"the next step would not accept it as extra_env_info: {NOT_ACCEPTED} Field required."
NAN = "it is not JSON: sample: Value error, it holds nan, which JSON cannot express."
ATTRIBUTES: list[tuple[dict[str, Any], str]] = [
    ({"description": " "}, "description: String should have at least 1 character."),
    ({"ExtraEnvInfo": dict}, "ExtraEnvInfo: Input should be a subclass of BaseModel."),
    ({"lost_session": "retry"}, "lost_session: Input should be 'restart', 'reopen' or 'fail'."),
    ({"max_sessions": 0}, "max_sessions: Input should be greater than 0."),
    ({"max_concurrent_steps": True}, "max_concurrent_steps: Input should be a valid integer."),
    ({"tools": [1]}, "tools.0: Input should be a valid dictionary."),
    ({"session_idle_s": 0}, "session_idle_s: Input should be greater than 0."),
    ({"step": TaskEnvironment.step}, "it implements neither step nor step_batch nor open_session."),
]
EXAMPLES = [
    (faulty_examples([TWO, THREE], [TWO, FOUR]), "(2, seed=0) returned different samples the second time."),
    (faulty_examples([TWO, THREE, FOUR]), "(2, seed=0) returned 3 samples."),
    (faulty_examples([TWO, TWO]), "(2, seed=0) returned only 1 different samples."),
    (with_methods(example_samples=raising(FileNotFoundError("words.txt"))), " raised FileNotFoundError: words.txt."),
    (
        listed(lambda count, seed: [TWO, THREE, FOUR][:count] if seed == 0 else [FOUR, THREE, TWO][:count]),
        "(64, seed=0) returned 3 samples; repeat them where there are no more.",
    ),
    (
        listed(lambda count, _: [counting_sample(2 + place % 8) for place in range(count)]),
        "(64, seed=0) returned the same samples as with seed 1; choose or order them by the seed.",
    ),
]
SAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"extra_env_info": {"until": None}}, f"{NOT_ACCEPTED} Input should be a valid integer."),
    ({"messages": None}, "The sample has no prompt: give it messages, at least one."),
    ({"score": float("nan")}, NAN),
    ({"tags": {"a"}}, "it is not JSON: sample.tags: input was not a valid JSON value."),
]
OUTCOMES: list[tuple[Callable[[StepOutcome], Any], str]] = [
    (lambda _: None, f"{NOT_VALID}: step must return a StepOutcome, got NoneType."),
    (with_fields(metadata={"until": {3}}), f"{NOT_VALID}: outcome.metadata.until: input was not a valid JSON value."),
    (with_fields(metadata={"board": []}), f"metadata: {FIRST}: {NO_STATE}"),
    (with_random_reward, f"state: Sample 0, turn 1: its reward differed {STATE}"),
]
STARTS: list[tuple[Callable[[], StartOutcome], str, str]] = [
    (
        lambda: StartOutcome({"role": "user", "content": f"{random.random()}"}),
        "start",
        "start returned something else the second time: seed what is random by a field of extra_env_info.",
    ),
    (lambda: dict[str, StartOutcome]()["board"], "start", "start raised KeyError: 'board'."),
    (lambda: StartOutcome(GO, metadata={"count": 1}), "metadata", NO_STATE),
    (StartOutcome, "start", "start raised ValueError: The sample has no prompt: give it messages, at least one."),
]


def one_wrong(count: int, seed: int) -> list[dict[str, Any]]:
    samples = [counting_sample(seed + 2 + place) for place in range(count)]
    return [*samples[:40], *([{**TWO, "score": float("nan")}] if count > 40 else []), *samples[41:]]


def blocking(outcome: StepOutcome) -> StepOutcome:
    time.sleep(0.2)
    return outcome


@pytest.mark.parametrize(
    ("environment", "arguments", "finding"),
    [
        *((with_methods(**fields), {}, f"attributes: {message}") for fields, message in ATTRIBUTES),
        *((made, {"samples": 2}, f"example_samples: example_samples{message}") for made, message in EXAMPLES),
        *(
            (faulty_examples([TWO, THREE | fault]), {"samples": 2}, f"sample: Sample 1: {message}")
            for fault, message in SAMPLES
        ),
        *((partial(Starting, begin), {}, f"{rule}: Sample 0: {message}") for begin, rule, message in STARTS),
        *((faulty_step(fault), {}, message) for fault, message in OUTCOMES),
        (listed(one_wrong), {}, f"example_samples: sample 40 of example_samples(64, seed=0) is not a sample: {NAN}"),
        (
            faulty_step(one_fault),
            {"replies": ["a" * 41, "b" * 41]},
            f"step: Sample 1, turn 2, reply '{'b' * 40}'...: step raised ZeroDivisionError: division by zero.",
        ),
        (
            with_methods(step=endless),
            {"samples": 1, "step_timeout_s": 0.05},
            f"step: {FIRST}: the step took longer than 0.05 s.",
        ),
        pytest.param(
            faulty_step(blocking),
            {"samples": 1, "max_block_s": 0.1},
            f"blocking: {FIRST}: the step blocked the event loop for more than 0.1 s, during which no other step could "
            "run. Await what takes long, or run it by asyncio.to_thread.",
            marks=pytest.mark.slow,
        ),
        (OneGameAtATime(), TWO_GAMES, f"state: Sample 1, turn 2: its observation, reward, metadata differed {STATE}"),
        (AGameEach, TWO_GAMES, f"state: Sample 0, turn 2: step raised KeyError: 'Count to 3.' {STATE}"),
        (
            in_sessions(lambda _: CountInMemory(0), lost_session="reopen"),
            {},
            f"state: Sample 0, turn 2: its observation, terminated differed {STATE}",
        ),
        (in_sessions(lambda _: STUCK(0)), {}, "close: close of a session raised OSError: It is stuck."),
    ],
)
def test_what_breaks_one_rule_is_found_once_with_its_first_place(
    environment: Any, arguments: dict[str, Any], finding: str
) -> None:
    assert findings_of(environment, **arguments) == [finding]

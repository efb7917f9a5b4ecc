"""Validation of what goes into a step and what comes out of it, and how long it blocks the event loop."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_env import OutcomeInvalid, StepOutcome, steps
from rollout_env.records import LARGEST_REWARD
from rollout_env.steps import StepTooSlow, longest_block, validated_outcome
from tests import virtual_time
from tests.patterns import whole

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
HALF = "half of a surrogate pair, which UTF-8 cannot express"
rewards = st.floats(-LARGEST_REWARD, LARGEST_REWARD)
outcomes = st.builds(
    StepOutcome,
    observation=st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}),
    reward=rewards | st.dictionaries(st.text(), rewards),
    terminated=st.booleans(),
    metadata=st.none() | st.dictionaries(st.text(), json_values),
    next_stop_strings=st.none() | st.lists(st.text(min_size=1)),
    answer=st.none() | st.text(),
)


def outcome(**fields: Any) -> StepOutcome:
    plain: dict[str, Any] = {"observation": {"role": "user", "content": ""}, "reward": 0.0, "terminated": False}
    return StepOutcome(**plain | fields)


@given(outcomes)
def test_a_valid_outcome_passes_unchanged(valid: StepOutcome) -> None:
    assert validated_outcome(valid) == valid


def test_only_the_step_that_ends_the_rollout_needs_no_observation() -> None:
    last = outcome(observation=None, terminated=True)
    assert (validated_outcome(last), last.observations) == (last, [])
    with pytest.raises(OutcomeInvalid) as refusal:
        validated_outcome(outcome(observation=None))
    assert str(refusal.value) == (
        "The environment's outcome is not valid: outcome.observation: None is for the step that ends the rollout; "
        "return a message, or terminated=True."
    )


def test_a_valid_outcome_shares_nothing_with_the_environments_own() -> None:
    board = [[1, 2], [3, 0]]
    checked = validated_outcome(outcome(metadata={"board": board}))
    board[0][0] = 9
    assert checked.metadata == {"board": [[1, 2], [3, 0]]}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"observation": {"role": "narrator", "content": ""}},
            "outcome.observation.role: Input should be 'system', 'user', 'assistant', 'tool' or 'environment'",
        ),
        ({"observation": []}, "outcome.observation: List should have at least 1 item after validation, not 0"),
        (
            {"observation": [{"role": "user", "content": ""}, {"role": "tool", "content": "", "tool_call_id": 1}]},
            "outcome.observation.1.tool_call_id: Input should be a valid string",
        ),
        ({"terminated": None}, "outcome.terminated: Input should be a valid boolean"),
        ({"next_stop_strings": [""]}, "outcome.next_stop_strings.0: String should have at least 1 character"),
        (
            {"metadata": {"board": [{"score": float("nan")}]}},
            "outcome.metadata: Value error, it holds nan, which JSON cannot express",
        ),
        *(
            ({name: value}, f"outcome.{name}{inner}: Value error, it holds '\\ud800', {HALF}")
            for name, value, inner in (
                ("observation", {"role": "user", "content": "a\ud800"}, ".content"),
                ("answer", "\ud800", ""),
                ("metadata", {"board": [{"name": "\ud800"}]}, ""),
                ("reward", {"\ud800": 1.0}, ""),
                ("metrics", {"\ud800": 1.0}, ""),
            )
        ),
    ],
)
def test_an_invalid_field_is_refused_by_its_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(OutcomeInvalid, match=whole(f"The environment's outcome is not valid: {problem}.")):
        validated_outcome(outcome(**fields))


NO_REWARDS = (float("nan"), float("inf"), {"style": float("-inf")}, 3.5e38, {"style": -3.5e38}, None, "much")
NO_OBJECTS: Any = ({"board": {1, 2}}, {"time": object()}, {1: "one"}, ["board"])


@pytest.mark.parametrize(
    ("field", "value"), [*(("reward", value) for value in NO_REWARDS), *(("metadata", value) for value in NO_OBJECTS)]
)
def test_rewards_are_numbers_of_float32_and_metadata_is_a_json_object(field: str, value: Any) -> None:
    with pytest.raises(OutcomeInvalid, match=rf"outcome\.{field}[.:]"):
        validated_outcome(outcome(**{field: value}))


async def waits(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@virtual_time.synchronous
async def test_a_step_that_waits_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=virtual_time.now))
    result, longest_s = await longest_block(waits(10.0), timeout_s=60)
    assert (result, round(longest_s, 9)) == ("done", 0.0)
    assert virtual_time.now() == pytest.approx(10.0, abs=steps.BEAT_S)


@virtual_time.runs
async def test_a_step_that_takes_too_long_is_cancelled() -> None:
    step = asyncio.ensure_future(waits(60))
    with pytest.raises(StepTooSlow):
        await longest_block(step, timeout_s=0.05)
    await asyncio.sleep(0)
    assert step.cancelled()

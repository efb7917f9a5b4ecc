"""Following instructions: the scores are those of IFEval."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.tasks.instruction_following import InstructionFollowingEnvironment, _InstructionInfo
from rollout_env import StepOutcome, check
from tests.virtual_time import runs

# The library takes seconds to import.
pytestmark = pytest.mark.slow
EXAMPLES = [json.loads(line) for line in (Path(__file__).parent / "ifeval_examples.jsonl").read_text().splitlines()]
"""Of IFEval (google-research/instruction_following_eval, Apache 2.0): prompts, the replies of GPT-4 in its `data`
folder, and what its own evaluation says of each instruction: the shortest in which every kind of instruction is
followed and not, strictly and loosely."""


@pytest.fixture(scope="module")
def environments() -> Iterator[dict[str, InstructionFollowingEnvironment]]:
    made = {
        "strict": InstructionFollowingEnvironment(score="share"),
        "loose": InstructionFollowingEnvironment(score="share", strict=False),
        "all": InstructionFollowingEnvironment(),
    }
    yield made
    for environment in made.values():
        environment.close()


@runs
async def judged(environment: InstructionFollowingEnvironment, *rows: dict[str, Any]) -> list[StepOutcome]:
    steps = (
        environment.step(
            [{"role": "user", "content": row.get("prompt", "")}, {"role": "assistant", "content": row["response"]}],
            _InstructionInfo.model_validate(row),
        )
        for row in rows
    )
    return await asyncio.gather(*steps)


@pytest.mark.parametrize("score", ["strict", "loose"])
def test_the_shares_of_ifevals_examples_are_those_of_its_evaluation(
    environments: dict[str, InstructionFollowingEnvironment], score: str
) -> None:
    from if_verifiable.ifeval import INSTRUCTION_DICT  # type: ignore[import-untyped]

    assert {name for row in EXAMPLES for name in row["instruction_id_list"]} == set(INSTRUCTION_DICT)
    shares = [outcome.reward for outcome in judged(environments[score], *EXAMPLES)]
    assert shares == [sum(row[score]) / len(row[score]) for row in EXAMPLES]


def row(response: str, **instructions: dict[str, Any]) -> dict[str, Any]:
    return {
        "response": response,
        "instruction_id_list": [name.replace("__", ":") for name in instructions],
        "kwargs": list(instructions.values()),
    }


def test_all_instructions_must_be_followed_unless_their_share_counts(
    environments: dict[str, InstructionFollowingEnvironment],
) -> None:
    half = row("A river without it", punctuation__no_comma={}, keywords__existence={"keywords": ["cat"]})
    [outcome] = judged(environments["all"], half)
    assert outcome == StepOutcome(
        {"role": "user", "content": "Not followed: keywords:existence."}, reward=0.0, terminated=True
    )
    assert [outcome.reward for outcome in judged(environments["strict"], half)] == [0.5]
    followed = {**half, "response": "A river and a cat"}
    assert judged(environments["all"], followed)[0].reward == 1.0


def test_empty_replies_and_reasoning_follow_nothing(environments: dict[str, InstructionFollowingEnvironment]) -> None:
    replies = ("", "<think>Well, yes, so", "<think>Well, yes</think>No")
    rewards = [one.reward for one in judged(environments["all"], *(row(r, punctuation__no_comma={}) for r in replies))]
    assert rewards == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (row("", punctuation__no_dots={}), "there is no instruction 'punctuation:no_dots'; the known ones are"),
        (row("", keywords__existence={"keywords": None}), "the instruction 'keywords:existence' needs keywords among"),
        ({**row("", punctuation__no_comma={}), "kwargs": []}, "there are 1 instructions and 0 kwargs: send as many"),
    ],
)
def test_a_sample_without_what_its_instructions_need_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        _InstructionInfo.model_validate(wrong)


def test_it_keeps_the_rules_for_environments() -> None:
    check(InstructionFollowingEnvironment, samples=2)

"""What `models/small` learns: exercises with their solutions, and how they are played and judged."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.recipes import NO_LOSS, Conversation
from models.small.recipe import playing
from models.small.recipe.chat_format import make_tokenizer
from models.small.recipe.curriculum import LONG, SHORT, SKILLS, batched, conversation, steps_of_batches
from models.small.recipe.exercises import Exercise, Skill, call, draw_exercise, is_held_out, reply, result
from models.small.recipe.text_skills import addition, addition_thought, copying, json_answer, python
from models.small.recipe.tool_skills import any_tool, calculate, calculator, search

tokenizer = make_tokenizer()
END = 258
seeds = st.integers(0, 10**6)
judged_here = st.sampled_from([copying, addition, json_answer, calculator, search, any_tool])
FLAWS: Sequence[Callable[[str], str]] = (lambda said: said[:-1], lambda said: said.replace("{", "{0", 1), lambda _: "")


def spoken(message: dict[str, Any]) -> str:
    """What a model says for an assistant message."""
    rendered = tokenizer.apply_chat_template([message], tokenize=False)
    return str(rendered).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


@given(skill=judged_here, seed=seeds)
def test_the_solution_of_an_exercise_is_right_and_a_flawed_one_is_not(skill: Skill, seed: int) -> None:
    exercise = skill(random.Random(seed))
    final = exercise.solution[-1]["content"]
    assert exercise.is_right(final)
    assert not any(exercise.is_right(flawed(final)) for flawed in FLAWS if flawed(final) != final)


@given(skill=judged_here, seed=seeds)
def test_the_results_in_a_solution_are_what_the_tools_answer(skill: Skill, seed: int) -> None:
    exercise = skill(random.Random(seed))
    calls = [message["tool_calls"][0]["function"] for message in exercise.solution if "tool_calls" in message]
    given_results = [message["content"] for message in exercise.solution if message["role"] == "tool"]
    answers = [exercise.results[one["name"]](json.loads(one["arguments"])) for one in calls]
    assert answers == given_results
    assert bool(calls) == exercise.asks_for_call
    assert {one["name"] for one in calls} <= {tool["function"]["name"] for tool in exercise.tools}


@pytest.mark.slow
def test_the_programs_of_the_solutions_pass_in_the_task_code() -> None:
    draw = random.Random(0)
    exercises = [python(draw) for _ in range(20)]
    assert all(exercise.is_right(exercise.solution[-1]["content"]) for exercise in exercises)
    assert not any(exercise.is_right("```python\nf = print\n```") for exercise in exercises[:5])


@given(skill=st.sampled_from([*SHORT, *LONG]), seed=seeds)
def test_held_out_questions_are_never_trained_on(skill: Skill, seed: int) -> None:
    draw = random.Random(seed)
    assert not is_held_out(draw_exercise(skill, draw).question)
    assert is_held_out(draw_exercise(skill, draw, held_out=True).question)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 7) * 31 - 1000", "-411"),
        ("7 / 2", "Error: only +, - and * of whole numbers are known"),
        ("2 ** 9", "Error: only +, - and * of whole numbers are known"),
        ("__import__('os')", "Error: only +, - and * of whole numbers are known"),
        ("1" * 201, "Error: the expression is too long"),
    ],
)
def test_the_calculator_knows_sums_differences_and_products(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_a_broken_expression_is_an_error() -> None:
    assert calculate("1 +").startswith("Error: ")


@pytest.mark.parametrize(
    ("left", "right", "thought"),
    [(17, 25, "7+5=12 1+2+1=4"), (95, 5, "5+5=10 9+0+1=10"), (0, 0, "0+0=0"), (1, 230, "1+0=1 0+3=3 0+2=2")],
)
def test_the_thought_of_an_addition_is_its_digits_with_what_is_carried(left: int, right: int, thought: str) -> None:
    assert addition_thought(left, right) == thought


@given(skill=st.sampled_from([*SHORT, *LONG]), seed=seeds)
def test_a_conversation_teaches_what_the_perfect_model_says(skill: Skill, seed: int) -> None:
    one = conversation(tokenizer, skill, random.Random(seed))
    learnt = str(tokenizer.decode([label for label in one.labels if label != NO_LOSS]))
    exercise = draw_exercise(skill, random.Random(seed))
    first = exercise.solution[0]
    assert learnt.startswith((spoken(first), spoken({**first, "reasoning_content": None})))
    assert learnt.endswith("<|im_end|>")
    assert len(one.token_ids) < 4096


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_batches_hold_all_conversations_within_their_bound_of_tokens(lengths: list[int]) -> None:
    batches = batched([Conversation([0] * length, [0] * length) for length in lengths], tokens=100)
    assert sorted(len(one.token_ids) for batch in batches for one in batch) == sorted(lengths)
    assert all(len(batch) * max(len(one.token_ids) for one in batch) <= 100 for batch in batches)


def test_equal_seeds_give_equal_batches() -> None:
    first, second = (next(iter(steps_of_batches(tokenizer, 1, seed=3))) for _ in range(2))
    assert first == second
    assert next(iter(steps_of_batches(tokenizer, 1, seed=4))) != first


EXERCISE = Exercise(
    "Q",
    [call("double", {"of": 4}), result("8"), reply("8")],
    lambda said: said == "8",
    results={"double": lambda given: str(2 * given["of"])},
    asks_for_call=True,
)
CALL = spoken(EXERCISE.solution[0])


def played(*said: str) -> playing.Play:
    """The exercise, with a model that says these texts one after another."""
    texts = iter(said)

    def scripted(prompts: Sequence[list[int]]) -> list[list[int]]:
        return [[*tokenizer(next(texts), add_special_tokens=False)["input_ids"], END] for _ in prompts]

    [one] = playing.play(scripted, tokenizer, [EXERCISE])
    return one


def test_a_played_exercise_has_the_ids_of_its_rendered_conversation() -> None:
    one = played(CALL, "<think>so</think>8")
    final = reply("8", "so")
    messages = [{"role": "user", "content": "Q"}, *EXERCISE.solution[:-1], final]
    assert (one.right, one.calls) == (True, 1)
    assert str(tokenizer.decode(one.token_ids)) + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (["8"], False),
        ([CALL, "9"], False),
        ([CALL, CALL, "8"], True),
        ([CALL, CALL, CALL, CALL], False),
        (["<tool_call>\n{\n</tool_call>", "8"], False),
    ],
)
def test_a_reply_is_right_after_calls_only_and_within_the_turns(said: list[str], right: bool) -> None:
    assert played(*said).right == right


@pytest.mark.parametrize("asked", ["{", "[]", '{"name": "other", "arguments": {}}', '{"name": "double"}', '"double"'])
def test_what_is_no_call_gets_an_error_as_its_result(asked: str) -> None:
    assert playing.answered_call(EXERCISE, asked) == "Error: this is no call of a tool."


def test_every_skill_is_trained_and_measured() -> None:
    assert {*SKILLS.values(), copying} == {*SHORT, *LONG}

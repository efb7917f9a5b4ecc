"""The math environment: what counts as right, and that no answer can hang it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deployments.environments.host import _refused_fields
from deployments.tasks.math import MathEnvironment, _compare, _ground_truth_text, _MathInfo
from deployments.tasks.replies import AnswerForm, last_box
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TemporaryFailure, check
from tests.patterns import whole
from tests.virtual_time import runs

RIGHT, WRONG = {"correctness": 1.0}, {"correctness": 0.0}
HOSTILE = "\\boxed{10^{10^{10^{10}}}}"


def conversation(response: str) -> list[ChatMessage]:
    return [{"role": "user", "content": "What is 17 + 25?"}, {"role": "assistant", "content": response}]


@pytest.fixture(scope="module")
def environment() -> Iterator[MathEnvironment]:
    """Its limit ends no comparison of the tests, on however slow a machine."""
    environment = MathEnvironment(processor_time_limit_s=60.0)
    yield environment
    environment.close()


def judge(
    environment: MathEnvironment, response: str, ground_truth: str | int | float = "42", form: AnswerForm | None = None
) -> StepOutcome:
    info = _MathInfo(ground_truth=ground_truth, answer_form=form)
    return asyncio.run(environment.step(conversation(response), info))


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [("42", "Environment: correct", RIGHT), ("41", "Environment: incorrect. Expected 42.", WRONG)],
)
def test_an_answer_ends_the_rollout_and_the_right_one_is_told(
    environment: MathEnvironment, answer: str, said: str, reward: dict[str, float]
) -> None:
    assert judge(environment, f"So it is \\boxed{{{answer}}}.") == StepOutcome(
        observation={"role": "user", "content": said}, reward=reward, terminated=True, answer=answer
    )


NO_MATH = "extra_env_info.ground_truth is not a mathematical expression: "


@pytest.mark.parametrize(
    ("truth", "form", "says"),
    [
        *((truth, None, f"{NO_MATH}{truth!r}") for truth in ("", "  ", "}{", "\\frac{")),
        ("cat", "choice", "extra_env_info.ground_truth is not the letter of a choice: 'cat'"),
    ],
)
def test_a_ground_truth_that_cannot_be_read_rejects_the_sample(
    environment: MathEnvironment, truth: str, form: AnswerForm | None, says: str
) -> None:
    with pytest.raises(SampleRejected, match=whole(says)):
        judge(environment, "\\boxed{B}", truth, form)


@pytest.mark.slow
def test_an_answer_that_needs_too_much_processor_time_is_wrong_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with closing(MathEnvironment(processor_time_limit_s=1.0)) as environment:
        outcome = judge(environment, HOSTILE)
        assert judge(environment, "\\boxed{42}").reward == RIGHT
    said = "Environment: incorrect. The check took more than 1 s of processor time."
    assert outcome == StepOutcome(
        observation={"role": "user", "content": said}, reward=WRONG, terminated=True, answer="10^{10^{10^{10}}}"
    )
    assert caplog.messages == ["An answer was judged wrong because comparing it took more than 1 s of processor time."]


def test_a_comparison_without_a_result_is_lost_and_has_no_reward() -> None:
    with closing(MathEnvironment()) as impatient:
        impatient.pool.lost_after_s = 0.001
        with pytest.raises(TemporaryFailure):
            judge(impatient, "\\boxed{42}")


@pytest.mark.parametrize(("num_cpus", "workers"), [(None, 1), (0.1, 1), (1, 1), (2.5, 3)])
def test_there_is_a_worker_for_each_core_that_ray_reserves(
    num_cpus: float | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr("deployments.tasks.support.WorkerPool", lambda workers, *_: started.append(workers))
    context = SimpleNamespace(get_actor_id=lambda: "actor", get_assigned_resources=lambda: {"CPU": num_cpus})
    monkeypatch.setattr(ray, "is_initialized", lambda: num_cpus is not None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert MathEnvironment().max_concurrent_steps == 2 * workers
    assert started == [workers]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("no box", None),
        ("} {\\boxed{3}", "3"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\}}", "\\}"),
        ("\\boxed{7} \\fbox {42}", "42"),
    ],
)
def test_the_last_box_is_the_last_whose_braces_close(text: str, content: str | None) -> None:
    assert last_box(text) == content


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_written_without_exponent_and_loses_nothing(value: float) -> None:
    text = _ground_truth_text(value)
    assert "e" not in text.lower()
    assert float(text) == value


def test_it_keeps_the_rules_for_environments() -> None:
    check(MathEnvironment, samples=2)


def cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]


PAIRS = [
    (row["gold"], f"\\boxed{{{answer}}}", row["is_right"])
    for row in cases("math_pairs.jsonl")
    for answer in row["answers"]
]
"""Answers as people write them in LaTeX, and whether they are right."""
CASES = [(case["gold"], case["answer"], case["is_right"]) for case in cases("math_verify_cases.jsonl")]
"""From the folder `tests` of Math-Verify 0.9 (MIT and Apache 2.0): all cases that mean the same without options.

Left out are those with options of precision and of relations, two that forbid plain numbers, 1,22 for 1.22, one that
wants 1 + 1/e to be 1 - 1/e, and ground truths of more than 1000 characters.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "table", [pytest.param(PAIRS, id="pairs"), pytest.param(CASES, id="Math-Verify", marks=pytest.mark.long)]
)
@runs
async def test_answers_are_judged_in_all_the_forms_in_which_people_write_them(
    environment: MathEnvironment, table: list[tuple[str, str, bool]]
) -> None:
    outcomes = await asyncio.gather(
        *(environment.step(conversation(said), _MathInfo(ground_truth=truth)) for truth, said, _ in table)
    )
    judged = [(*case[:2], outcome.reward == RIGHT) for case, outcome in zip(table, outcomes, strict=True)]
    assert [case for case in judged if case not in table] == []


RECONSIDERED = "\\boxed{7}. Let me check that again, which is needed because I was not sure. So \\fbox{42}."


@pytest.mark.parametrize(
    ("form", "truth", "right", "wrong"),
    [
        ("any", "2", [], ["The answer is 2 2/3.", "The answer is $2\\frac{2}{3}$."]),
        ("any", "\\frac{8}{3}", ["The answer is 2 2/3."], ["It is -2 2/3, I think."]),
        ("any", "13", ["So $x = 13~\\mathrm{cm}$."], []),
        ("any", "1000000", ["The answer is $1\\,000\\,000$."], []),
        (
            "any",
            "42",
            [RECONSIDERED, "\\fbox{42}", "$$\\fbox{$42$}$$", "**Answer:** **42**"],
            ["\\boxed{\\foo 42}", ""],
        ),
        ("any", "7", [], ["7 and then \\fbox{42}"]),
        ("any", "\\frac{1}{2^{99}}", [], ["It is $\\frac{1}{2^{98}}$."]),
        ("boxed", "42", ["\\fbox{42}", "\\boxed{7}, no, \\boxed{42}"], ["The answer is 42.", ""]),
        ("boxed", "42", [], ["\\boxed{42}, no, \\boxed{7}", "\\boxed{}", "I do not know."]),
        ("answer_line", "42", ["So it is 42.\n\nAnswer: 42", "Answer: 41\nNo.\n**Answer:** $42$"], ["Answer:\n42"]),
        ("answer_line", "42", ["Answer: \\boxed{42}"], ["The answer is \\boxed{42}"]),
        ("choice", "B", ["\\boxed{B}", "\\boxed{\\text{(b)}}", "I think:\nAnswer: (B) a cat"], ["Because B is right."]),
        ("choice", "B", ["Answer: B. Because it is.", "**Answer: B**"], ["\\boxed{A}\nAnswer: B", "Answer: A and B"]),
    ],
)
def test_an_answer_counts_only_where_its_form_has_it(
    environment: MathEnvironment, form: AnswerForm, truth: str, right: list[str], wrong: list[str]
) -> None:
    rewards = [judge(environment, response, truth, form).reward for response in (*right, *wrong)]
    assert rewards == [RIGHT] * len(right) + [WRONG] * len(wrong)


@given(st.integers(-(10**40), 10**40), st.integers(-(10**40), 10**40), st.integers(1, 10**40))
def test_fractions_are_equal_where_they_are_in_arithmetic(left: int, right: int, under: int) -> None:
    compared = _compare(f"\\frac{{{left}}}{{{under}}}", f"\\boxed{{\\frac{{{right}}}{{{under}}}}}").correct
    assert compared is (left == right)
    assert _compare(f"\\frac{{{left}}}{{{under}}}", f"\\boxed{{\\frac{{{3 * left}}}{{{3 * under}}}}}").correct


SEPARATORS = st.sampled_from([",", "\\,", "{,}", "\\;", "~", "\\ ", ",\\!", "\u202f"])
UNITS = st.sampled_from(
    ["", "\\text{ m/s}", "\\,\\text{cm}^2", " \\mbox{ kg}", "\\ \\mathrm{m\\,s^{-1}}", " people", "~red balls per hour"]
)
WRAPPERS = st.sampled_from(
    ["{}", "\\mathbf{{{}}}", "\\text{{{}}}", "\\boldsymbol{{{}}}", "\\displaystyle {}", "{{\\bf {}}}"]
)


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(-(10**12), 10**12), SEPARATORS, UNITS, WRAPPERS)
def test_separators_units_and_bold_change_no_number(number: int, separator: str, unit: str, wrapper: str) -> None:
    answer = f"\\boxed{{{wrapper.format(f'{number:,}'.replace(',', separator))}{unit}}}"
    assert _compare(str(number), answer).correct
    assert not _compare(str(number + 1), answer).correct


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 9999), st.integers(1, 9998), st.integers(2, 9999), st.sampled_from(["", "-"]))
def test_a_mixed_number_is_the_sum_of_its_parts(whole: int, numerator: int, denominator: int, sign: str) -> None:
    assume(numerator < denominator and whole > 0)
    value = Fraction(f"{sign}1") * (whole + Fraction(numerator, denominator))
    for answer in (f"{sign}{whole} {numerator}/{denominator}", f"{sign}{whole}\\frac{{{numerator}}}{{{denominator}}}"):
        assert _compare(f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"\\boxed{{{answer}}}").correct
        assert not _compare(f"{sign}{whole}", f"\\boxed{{{answer}}}").correct


@pytest.mark.slow
def test_math_verify_itself_still_takes_near_numbers_as_equal() -> None:
    # When this fails, `math_exact.py` is needed no more.
    near = "from math_verify import parse, verify; print(verify(parse('$2^{-99}$'), parse('$2^{-98}$')))"
    assert subprocess.run([sys.executable, "-c", near], check=True, capture_output=True, text=True).stdout == "True\n"


PROSE = [
    *("The answer is 42.", "42 is the answer", "Natalia sold 48/2 = 24 clips in May.\n#### 72"),
    *("The area is $\\frac{1}{2}$.", "two apples", "all real numbers", "答案是42"),
]
NO_PROSE = [
    *("42", "x=5 or x=-5", "AB=4, CD=5", "13 widgets", "12 square feet", "1 hour 30 minutes", "June 20", "yes", "B"),
    *("\\text{No such number exists}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "sin x and cos x", "$19, 46, and 82$"),
    *("\\sqrt{2}\\text{ square units of the plane}", "x \\in \\mathbb{R}", "So it must be \\boxed{4}.", "3元"),
]


def test_prose_is_refused_as_a_ground_truth_before_anything_runs(environment: MathEnvironment) -> None:
    refused = _refused_fields(environment.ExtraEnvInfo, [{"ground_truth": truth} for truth in [*NO_PROSE, *PROSE]])
    assert [PROSE[field.place - len(NO_PROSE)] for field in refused] == PROSE
    says = "it is prose, of which no number can be taken as the answer: give the answer alone"
    assert all(field.location == ("ground_truth",) and field.message.startswith(says) for field in refused)


def test_prose_is_compared_as_a_text_where_the_task_says_so() -> None:
    truth = "all real numbers"
    cases: list[tuple[str, AnswerForm, bool]] = [
        ("So: \\boxed{\\text{all  real numbers.}}", "boxed", True),
        ("All real\nnumbers.", "any", True),
        ("I think all real numbers", "any", False),
        (truth, "boxed", False),
        (f"Answer: {truth}", "answer_line", True),
        ("", "any", False),
    ]
    with closing(MathEnvironment(text_answers=True)) as environment:
        assert _refused_fields(environment.ExtraEnvInfo, [{"ground_truth": truth}]) == []
        for response, form, is_right in cases:
            info: Any = environment.ExtraEnvInfo.model_validate({"ground_truth": truth, "answer_form": form})
            outcome = asyncio.run(environment.step(conversation(response), info))
            assert outcome.reward == (RIGHT if is_right else WRONG), response


def test_the_right_choice_may_be_followed_by_words() -> None:
    with closing(MathEnvironment(answer_form="choice")) as environment:
        assert _refused_fields(environment.ExtraEnvInfo, [{"ground_truth": "(B) the red ball"}]) == []
    assert _refused_fields(_MathInfo, [{"ground_truth": "(B) the red ball", "answer_form": "choice"}]) == []
    assert len(_refused_fields(_MathInfo, [{"ground_truth": "(B) the red ball"}])) == 1


def test_the_format_has_a_reward_of_its_own() -> None:
    with closing(MathEnvironment(answer_form="answer_line", wrong_reward=-1.0, format_reward=0.25)) as environment:
        assert judge(environment, "Answer: 42").reward == {"correctness": 1.0, "format": 0.25}
        assert judge(environment, "Answer: 41").reward == {"correctness": -1.0, "format": 0.25}
        assert judge(environment, "Answer: 42\nI hope so.").reward == {"correctness": 1.0, "format": 0.0}
        assert judge(environment, "42").reward == {"correctness": -1.0, "format": 0.0}

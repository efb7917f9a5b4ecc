"""Skills without tools: copying, additions with a written thought, small Python programs, answers in JSON."""

import asyncio
import atexit
import json
import random
import string
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from deployments.tasks.code import CodeEnvironment, CodeInfo
from deployments.tasks.math import addition_prompt
from deployments.tasks.replies import last_box
from models.small.recipe.exercises import Exercise, invented_name, number, reply
from rollout_env import ChatMessage

LETTERS = string.ascii_letters + string.digits + "   .,+-*/()"
TESTED_NUMBERS = ((0, 3), (1, 1), (5, 2), (-7, 4))


def copying(draw: random.Random) -> Exercise:
    """Teaches to copy: what all other skills do with the words and numbers of a question.

    Half of the texts are names. They share syllables: copying one takes more than the letter that came last.
    """
    if draw.random() < 0.5:
        text = " ".join(invented_name(draw) for _ in range(draw.randint(1, 5)))
    else:
        text = "".join(draw.choices(LETTERS, k=draw.randint(4, 40))).strip() or "0"
    return Exercise(f"Repeat: {text}", [reply(text)], lambda said: said == text)


def addition_thought(left: int, right: int) -> str:
    """The sums of the digits from the last to the first, each with what is carried: `7+5=12 1+2+1=4`."""
    steps: list[str] = []
    carried = 0
    while left or right or not steps:
        terms = [left % 10, right % 10, *([carried] if carried else [])]
        steps.append(f"{'+'.join(map(str, terms))}={sum(terms)}")
        left, right, carried = left // 10, right // 10, sum(terms) // 10
    return " ".join(steps)


def addition(draw: random.Random) -> Exercise:
    """The questions of the task `math`, with larger numbers too."""
    digits = draw.choice([2, 2, 3])
    left, right = number(draw, digits), number(draw, digits)
    total = str(left + right)
    solution = reply(f"\\boxed{{{total}}}", addition_thought(left, right))
    return Exercise(addition_prompt(left, right), [solution], lambda said: last_box(said) == total)


def code_block(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


@cache
def code_task() -> tuple[asyncio.Runner, CodeEnvironment]:
    """The task `code` with its sandbox, and the event loop in which it runs; both are closed at exit."""
    runner, environment = asyncio.Runner(), CodeEnvironment()
    atexit.register(runner.close)
    atexit.register(environment.close)
    return runner, environment


def passes(said: str, tests: list[dict[str, Any]]) -> bool:
    """Whether the program of a reply passes the tests, in the judgement of the task `code`."""
    runner, environment = code_task()
    log: list[ChatMessage] = [{"role": "assistant", "content": said}]
    return runner.run(environment.step(log, CodeInfo.model_validate({"tests": tests}))).reward == 1.0


def function_of_one(draw: random.Random) -> Exercise:
    """As the examples of the task `code` have it."""
    factor, summand = draw.randrange(99), draw.randrange(99)
    prompt = f"Write a Python function f(x) that returns {factor} * x + {summand}. Reply with one code block."
    tests = [{"call": f"f({x})", "expected": factor * x + summand} for x, _ in TESTED_NUMBERS]
    said = code_block("def f(x):", f"    return {factor} * x + {summand}")
    return Exercise(prompt, [reply(said)], lambda given: passes(given, tests))


class Operation(NamedTuple):
    """Of two numbers, and one that the question gives."""

    words: str
    expression: str
    value: Callable[[int, int, int], int]


OPERATIONS = (
    Operation("the sum of {a} and {b}", "{a} + {b}", lambda a, b, _: a + b),
    Operation("the product of {a} and {b}", "{a} * {b}", lambda a, b, _: a * b),
    Operation("{a} minus {b}", "{a} - {b}", lambda a, b, _: a - b),
    Operation("the larger of {a} and {b}", "max({a}, {b})", lambda a, b, _: max(a, b)),
    Operation("the smaller of {a} and {b}", "min({a}, {b})", lambda a, b, _: min(a, b)),
    Operation("the square of {a} plus {b}", "{a} ** 2 + {b}", lambda a, b, _: a**2 + b),
    Operation("{n} times {a} minus {b}", "{n} * {a} - {b}", lambda a, b, n: n * a - b),
)


def function_of_two(draw: random.Random) -> Exercise:
    """The operation is said in words."""
    name, (a, b), n = invented_name(draw).lower(), draw.sample("abcdhkmnpqrstuvwxyz", 2), draw.randrange(2, 10)
    words, expression, value = draw.choice(OPERATIONS)
    said = code_block(f"def {name}({a}, {b}):", "    return " + expression.format(a=a, b=b, n=n))
    wanted = words.format(a=a, b=b, n=n)
    prompt = f"Write a Python function {name}({a}, {b}) that returns {wanted}. Reply with one code block."
    tests = [{"call": f"{name}({x}, {y})", "expected": value(x, y, n)} for x, y in TESTED_NUMBERS]
    return Exercise(prompt, [reply(said)], lambda given: passes(given, tests))


PROGRAMS = (
    Operation("it times {n}", "n * {n}", lambda read, _, n: read * n),
    Operation("it plus {n}", "n + {n}", lambda read, _, n: read + n),
    Operation(
        "the sum of all numbers from 1 to it, plus {n}",
        "sum(range(n + 1)) + {n}",
        lambda read, _, n: sum(range(read + 1)) + n,
    ),
)


def printing_program(draw: random.Random) -> Exercise:
    """A program that reads a number and prints another."""
    n = draw.randrange(2, 100)
    words, expression, value = draw.choice(PROGRAMS)
    wanted = words.format(n=n)
    prompt = f"Write a Python program that reads a number and prints {wanted}. Reply with one code block."
    tests = [{"stdin": f"{read}\n", "stdout": f"{value(read, 0, n)}\n"} for read in (0, 4, 12)]
    said = code_block("n = int(input())", f"print({expression.format(n=n)})")
    return Exercise(prompt, [reply(said)], lambda given: passes(given, tests))


def python(draw: random.Random) -> Exercise:
    return draw.choice([function_of_one, function_of_two, printing_program])(draw)


def json_answer(draw: random.Random) -> Exercise:
    """Facts of a sentence as a JSON object with the asked keys, in their order."""
    name, city = f"{invented_name(draw)} {invented_name(draw)}", invented_name(draw)
    facts = {"name": name, "age": draw.randint(2, 99), "city": city, "score": number(draw, 3)}
    asked = draw.sample(list(facts), draw.randint(2, 4))
    sentence = f"{name} is {facts['age']} years old, lives in {city} and has {facts['score']} points."
    prompt = f"Answer in JSON with the keys {', '.join(asked)}: {sentence}"
    expected = {key: facts[key] for key in asked}

    def is_right(said: str) -> bool:
        try:
            return bool(json.loads(said) == expected)
        except ValueError:
            return False

    return Exercise(prompt, [reply(json.dumps(expected))], is_right)

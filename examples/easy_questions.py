"""Two tasks for a small language model: which of two numbers is larger, and how often a letter is in a word.

Learn from it how a task of your own takes the judgement of a built-in one, and brings its own questions.
"""

import random
from typing import Any

from deployments.environments.math import MathEnvironment

LARGEST = 99
WORDS = [
    "apple",
    "banana",
    "bottle",
    "button",
    "carrot",
    "cherry",
    "coffee",
    "kitten",
    "pepper",
    "strawberry",
    "window",
]
INSTRUCTION = "Reply with the number alone."


class LargerNumberEnvironment(MathEnvironment):
    """One turn, judged like `math`."""

    description = "Two numbers from 1 to 99; reward 1 for the larger one."

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        draw = random.Random(seed)
        pairs = [draw.sample(range(1, LARGEST + 1), k=2) for _ in range(count)]
        return [sample(f"Which number is larger, {one} or {other}?", max(one, other)) for one, other in pairs]


class LetterCountEnvironment(MathEnvironment):
    """One turn, judged like `math`."""

    description = "A word and one of its letters; reward 1 for how often the letter is in the word."

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        draw = random.Random(seed)
        asked = [(word := draw.choice(WORDS), draw.choice(word)) for _ in range(count)]
        return [sample(f'How many times is the letter "{x}" in the word "{word}"?', word.count(x)) for word, x in asked]


def sample(question: str, answer: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "extra_env_info": {"ground_truth": answer},
    }

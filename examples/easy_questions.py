"""Two tasks for a small language model: which of two numbers is larger, and how often a letter is in a word.

Learn from it how a task of your own takes the judgement of a built-in one, and brings its own questions.
"""

import random
from collections.abc import Sequence
from typing import Any

from deployments.tasks.math import MathEnvironment

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
LARGER_EXAMPLES = [
    {"role": "user", "content": "Which number is larger, 12 or 47?"},
    {"role": "assistant", "content": "47"},
    {"role": "user", "content": "Which number is larger, 83 or 35?"},
    {"role": "assistant", "content": "83"},
]
"""Without them the model writes sentences, whose last number would count: "50 is larger than 98"."""
LETTER_EXAMPLES = [
    {"role": "user", "content": 'How many times is the letter "o" in "moon"?'},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": 'How many times is the letter "c" in "cat"?'},
    {"role": "assistant", "content": "1"},
]
"""Without them the model writes sentences, which are hardly ever right."""


class LargerNumberEnvironment(MathEnvironment):
    """One turn, judged like `math`, after two questions that have been answered."""

    description = "Two numbers from 1 to 99; reward 1 for the larger one."

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        draw = random.Random(seed)
        pairs = [draw.sample(range(1, LARGEST + 1), k=2) for _ in range(count)]
        question = "Which number is larger, {} or {}?"
        return [sample(question.format(*pair), max(pair), LARGER_EXAMPLES) for pair in pairs]


class LetterCountEnvironment(MathEnvironment):
    """One turn, judged like `math`, after two questions that have been answered."""

    description = "A word and one of its letters; reward 1 for how often the letter is in the word."

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        draw = random.Random(seed)
        asked = [(word := draw.choice(WORDS), draw.choice(word)) for _ in range(count)]
        question = 'How many times is the letter "{}" in "{}"?'
        return [sample(question.format(letter, word), word.count(letter), LETTER_EXAMPLES) for word, letter in asked]


def sample(question: str, answer: int, before: Sequence[dict[str, str]]) -> dict[str, Any]:
    """A prompt of the messages `before` and the question."""
    return {
        "messages": [*before, {"role": "user", "content": question}],
        "extra_env_info": {"ground_truth": answer},
    }

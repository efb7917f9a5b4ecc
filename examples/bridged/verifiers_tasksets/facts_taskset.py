"""A taskset of verifiers with one turn a task: one fact of a sentence, as JSON.

The first `HELD_OUT` tasks are for measuring: none of them comes back among the others. The embedded model with thoughts
was trained to give two facts and more, and mostly does so here at first.
"""

import json
import random
from zlib import crc32

import verifiers.v1 as vf

__all__ = ["FactsTaskset"]

HELD_OUT = 200
TRAINING = 4000
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


class FactData(vf.TaskData):
    expected: dict[str, str | int]


class FactTask(vf.Task[FactData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        try:
            return float(json.loads(trace.last_reply) == self.data.expected)
        except ValueError:
            return 0.0


class FactsTaskset(vf.Taskset[FactTask, vf.TasksetConfig]):
    def load(self):
        for held_out, count in ((True, HELD_OUT), (False, TRAINING)):
            for question, expected in questions(held_out, count):
                yield FactTask(FactData(prompt=question, expected=expected), self.config.task)


def questions(held_out, count):
    """So many different ones, which are held out or not: a tenth of all are."""
    draw = random.Random(0)
    found: dict[str, dict[str, object]] = {}
    while len(found) < count:
        question, expected = drawn(draw)
        if (crc32(question.encode()) % 10 == 0) == held_out:
            found[question] = expected
    return found.items()


def drawn(draw):
    name, city = f"{invented(draw)} {invented(draw)}", invented(draw)
    facts = {"name": name, "age": draw.randint(2, 99), "city": city, "score": draw.randrange(1000)}
    asked = draw.choice(list(facts))
    sentence = f"{name} is {facts['age']} years old, lives in {city} and has {facts['score']} points."
    return f"Answer in JSON with the key {asked}: {sentence}", {asked: facts[asked]}


def invented(draw):
    return "".join(draw.choices(SYLLABLES, k=draw.choice([2, 3, 3]))).capitalize()

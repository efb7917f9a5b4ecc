"""Which conversations are trained on, and when: copying first, then all skills, in batches of like length."""

import random
from collections.abc import Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerFast

from models.recipes import Conversation
from models.small.recipe.chat_format import conversation_of
from models.small.recipe.exercises import Message, Skill, draw_exercise
from models.small.recipe.text_skills import addition, copying, json_answer, python
from models.small.recipe.tool_skills import any_tool, calculator, search

SKILLS: Mapping[str, Skill] = {
    "addition": addition,
    "json": json_answer,
    "python": python,
    "calculator": calculator,
    "search": search,
    "any_tool": any_tool,
}
"""Measured by `measure`."""

SHORT: Mapping[Skill, float] = {copying: 2, addition: 2, json_answer: 1.5, python: 2}
LONG: Mapping[Skill, float] = {calculator: 1.5, search: 1.5, any_tool: 1}
COPYING_STEPS = 300
"""At the beginning, in which most conversations without tools are of copying."""
COPYING_WEIGHT = 12.0
TOKENS_PER_BATCH = 2048
BATCHES_AT_ONCE = 16
"""So many are made together, out of conversations sorted by length: little of them is padding."""
MOST_QUESTIONS = 4
"""Of a conversation with tools, whose schemas are its longest part: with more questions, more tokens are learnt."""
THINKING_SHARE = 0.75
"""The others are rendered with `enable_thinking=False`."""


def conversation(tokenizer: PreTrainedTokenizerFast, skill: Skill, draw: random.Random) -> Conversation:
    """One that the skill's perfect model has had, with up to `MOST_QUESTIONS` questions if they have the same tools."""
    first = draw_exercise(skill, draw)
    questions = draw.randint(1, MOST_QUESTIONS) if skill in (calculator, search) else 1
    exercises = [first, *(draw_exercise(skill, draw) for _ in range(questions - 1))]
    thinks = draw.random() < THINKING_SHARE
    messages: list[Message] = []
    for exercise in exercises:
        messages += [{"role": "user", "content": exercise.question}, *exercise.solution]
    if not thinks:
        messages = [{**message, "reasoning_content": None} for message in messages]
    return conversation_of(tokenizer, messages, first.tools, thinks)


def batched(conversations: Sequence[Conversation], tokens: int = TOKENS_PER_BATCH) -> list[list[Conversation]]:
    """Batches of like length that have at most so many tokens with padding, or one conversation."""
    batches: list[list[Conversation]] = [[]]
    for one in sorted(conversations, key=lambda one: len(one.token_ids)):
        if batches[-1] and (len(batches[-1]) + 1) * len(one.token_ids) > tokens:
            batches.append([])
        batches[-1].append(one)
    return batches


def endless_batches(
    tokenizer: PreTrainedTokenizerFast, weights: Mapping[Skill, float], draw: random.Random
) -> Iterator[list[Conversation]]:
    skills, shares = list(weights), list(weights.values())
    while True:
        pool: list[Conversation] = []
        while sum(len(one.token_ids) for one in pool) < BATCHES_AT_ONCE * TOKENS_PER_BATCH:
            pool.append(conversation(tokenizer, draw.choices(skills, shares)[0], draw))
        batches = batched(pool)
        draw.shuffle(batches)
        yield from batches


def steps_of_batches(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[list[list[Conversation]]]:
    """For each step a batch of short conversations and one of those with tools."""
    draw = random.Random(seed)
    copying_first = endless_batches(tokenizer, {**SHORT, copying: COPYING_WEIGHT}, draw)
    short, long = endless_batches(tokenizer, SHORT, draw), endless_batches(tokenizer, LONG, draw)
    for step in range(steps):
        yield [next(copying_first if step < COPYING_STEPS else short), next(long)]

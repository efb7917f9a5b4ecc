"""An exercise: a question, the replies of a perfect model, the tools that it may call, and when it is solved."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

Message = dict[str, Any]
Tool = Mapping[str, Any]
HELD_OUT_SHARE = 10
"""One question in so many is never trained on."""


@dataclass(frozen=True)
class Exercise:
    """One question. Its answer may take several turns, between which tools are called."""

    question: str
    solution: list[Message]
    """The messages that follow the question: replies and results of tools, ending with a reply."""
    is_right: Callable[[str], bool]
    """Judges a final reply, without its thought."""
    tools: list[Tool] = field(default_factory=list)
    results: Mapping[str, Callable[[dict[str, Any]], str]] = field(default_factory=dict)
    """What each tool answers to its arguments."""
    asks_for_call: bool = False
    """Whether a final reply counts only after the calls of the solution."""


Skill = Callable[[random.Random], Exercise]


def is_held_out(question: str) -> bool:
    return crc32(question.encode()) % HELD_OUT_SHARE == 0


def draw_exercise(skill: Skill, draw: random.Random, held_out: bool = False) -> Exercise:
    """An exercise of the skill that is, or is not, held out."""
    while is_held_out((exercise := skill(draw)).question) != held_out:
        pass
    return exercise


def reply(content: str, thought: str = "") -> Message:
    """Each reply begins with a thought, which may be empty."""
    return {"role": "assistant", "content": content, "reasoning_content": thought}


def call(tool: str, arguments: Mapping[str, Any], thought: str = "") -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)}
    calls = [{"id": "call", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": calls}


def result(content: str) -> Message:
    return {"role": "tool", "content": content}


def tool_schema(name: str, description: str, parameters: Mapping[str, str]) -> Tool:
    """A function whose parameters, of the given JSON types, are all required."""
    properties = {parameter: {"type": type_} for parameter, type_ in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def invented_name(draw: random.Random) -> str:
    """Such as `Mirato`: drawn from so many that a model must copy it."""
    return "".join(draw.choices(SYLLABLES, k=draw.choice([2, 3, 3]))).capitalize()


def number(draw: random.Random, digits: int) -> int:
    """Of at most so many digits; each count of digits is as likely."""
    length = draw.randint(1, digits)
    return draw.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)

"""Plays exercises with a model: it replies, its calls are answered, until a reply has no call."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.chat import ChatOptions
from models.small.recipe.chat_format import rendered_ids
from models.small.recipe.exercises import Exercise
from rollout_env import ChatMessage

Generate = Callable[[Sequence[list[int]]], list[list[int]]]
"""What a model says to each prompt, all in token ids, up to and with the end of its turn."""

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
THOUGHT = re.compile(r"^<think>.*?</think>", re.DOTALL)
MOST_TURNS = 4
ROOM = 4096


@dataclass
class Play:
    """An exercise under way."""

    exercise: Exercise
    token_ids: list[int]
    calls: int = 0
    """Those that a tool answered without an error."""
    over: bool = False
    right: bool = False


def answered_call(exercise: Exercise, text: str) -> str:
    """The result of a call, or what is wrong with it."""
    try:
        asked = json.loads(text)
        answer, arguments = exercise.results[asked["name"]], asked["arguments"]
    except (ValueError, TypeError, KeyError):
        return "Error: this is no call of a tool."
    return answer(arguments) if isinstance(arguments, dict) else "Error: the arguments are no object."


def take_reply(play: Play, said: str) -> list[ChatMessage]:
    """Judges the reply if it has no call; else the results of its calls."""
    exercise, text = play.exercise, THOUGHT.sub("", said)
    calls = CALL.findall(text)
    if calls:
        answers = [answered_call(exercise, asked) for asked in calls]
        play.calls += sum(not answer.startswith("Error: ") for answer in answers)
        return [{"role": "tool", "content": answer} for answer in answers]
    play.over = True
    play.right = (play.calls > 0 or not exercise.asks_for_call) and exercise.is_right(text)
    return []


def play(
    generate: Generate, tokenizer: PreTrainedTokenizerFast, exercises: Sequence[Exercise], thinks: bool = True
) -> list[Play]:
    """Plays each exercise once; tokens are only appended, as in a rollout of the service."""
    chat = TransformersChatTokenizer(tokenizer)
    options = ChatOptions(chat_template_kwargs=None if thinks else {"enable_thinking": False})
    plays = [
        Play(one, rendered_ids(tokenizer, [{"role": "user", "content": one.question}], one.tools, thinks, True))
        for one in exercises
    ]
    for _ in range(MOST_TURNS):
        if not (under_way := [one for one in plays if not one.over]):
            break
        for one, said in zip(under_way, generate([one.token_ids for one in under_way]), strict=True):
            one.token_ids += said
            results = take_reply(one, chat.decode(said))
            if results:
                appended = chat.observations(results, said, options, ROOM)
                one.token_ids += [token_id for observed in appended for token_id in observed.token_ids]
    return plays

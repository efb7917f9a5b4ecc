"""Plays one random session on a service with OpenAI's client, and keeps all that its calls were answered."""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.endurance.session_laws.conversations import ACTIONS, SUBAGENT, Conversation, Moves
from tests.endurance.session_laws.forms import FORMS, Message, parsed, reserialized

MOST_CALLS = 30
MAX_TOKENS = (1, 3, 8, 16, 96)
LEFT_STREAMS = 0.08
"""The share of streams that are left after their first event."""
QUESTIONS = ("What is {} + 17?", "A box holds {} pens. How many pens are in 13 boxes?", "Say {}, é and \N{SNOWMAN}.")
CALCULATOR: Message = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


CONTEXTS: dict[str, Message] = {
    "plain": {},
    "tools": {"tools": [CALCULATOR]},
    "no thoughts": {"chat_template_kwargs": {"enable_thinking": False}},
}
"""By name, what a call has beside its messages, as JSON."""


@dataclass(slots=True)
class Choice:
    """One response, as its caller got it."""

    id: str
    """As the record names it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    """`None` if the call did not ask for them."""
    finish_reason: str = ""
    message: Message = field(default_factory=lambda: {"role": "assistant", "content": ""})

    @property
    def is_cut_thought(self) -> bool:
        """A template ends the thought, which the engine has not: rendered anew, the response has other ids."""
        is_all = not self.message["content"] and not self.message.get("tool_calls")
        return self.finish_reason == "length" and is_all and bool(self.message.get("reasoning_content"))


@dataclass(slots=True)
class Call:
    """One call that was answered to its end, or that was left."""

    asked: Conversation[str]
    """In a context of `CONTEXTS`."""
    fresh: list[int]
    """What the service renders from the messages alone."""
    continues: list[str]
    """The ids of the responses that the conversation may go on from: several that say the same."""
    prompt: list[int] = field(default_factory=list)
    """Empty of a call that was left."""
    choices: list[Choice] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """The ids that the responses of a call that was left may have in the record."""


@dataclass(slots=True)
class PlayedSession:
    seed: int
    sampling: Message
    calls: list[Call] = field(default_factory=list)


class RandomAgent:
    """Plays what follows from one seed. Calls of one step run at the same time."""

    def __init__(self, http: httpx.AsyncClient, model: AsyncOpenAI, session: PlayedSession) -> None:
        """Args:
        http: of the service, for renderings outside of the session.
        model: of the session.
        session: what is played is added to it.
        """
        self._http = http
        self._model = model
        self._session = session
        self._draw = random.Random(session.seed)
        self._texts = 0
        self._moves = Moves(self._draw.choice, self._new, list(CONTEXTS), ("user", "tool"))
        self._conversations: list[Conversation[str]] = []
        self._said = defaultdict[tuple[str, tuple[str, ...]], list[Choice]](list)
        """The responses at the end of a conversation, by the name of its context and its origins."""

    async def play(self) -> None:
        """Raises what OpenAI's client raises."""
        calls = self._draw.randint(1, MOST_CALLS)
        while (left := calls - len(self._session.calls)) > 0:
            await self._step(min(left, self._draw.choice([1, 1, 1, 2, 3])))

    async def _step(self, count: int) -> None:
        action = self._draw.choice(ACTIONS) if self._conversations else SUBAGENT
        before = self._draw.choice(self._conversations) if self._conversations else Conversation("plain")
        asked = [self._moves.next(action, before) for _ in range(count)]
        calls = [Call(one, [], self._continued(one)) for one in asked]
        self._session.calls += calls
        await asyncio.gather(*(self._call(call, self._drawn_fields()) for call in calls))
        for call in calls:
            for choice in call.choices:
                self._remember(call.asked, choice)

    def _drawn_fields(self) -> Message:
        drawn = self._draw
        fields: Message = {"max_tokens": drawn.choice(MAX_TOKENS), "n": drawn.choice([1, 1, 1, 2, 3])}
        if "greedy" in self._session.sampling:
            # Equal choices: vLLM refuses them.
            fields["n"] = 1
        if drawn.random() < 0.5:
            fields["logprobs"] = True
        if drawn.random() < 0.4:
            fields["stream"] = True
            fields["is_left"] = drawn.random() < LEFT_STREAMS
        return fields

    def _new(self, role: str) -> Message:
        self._texts += 1
        # No other text of the session has this number.
        number = 100 * self._texts + self._draw.randrange(100)
        if role == "tool":
            return {"role": role, "content": str(number), "tool_call_id": f"call-{number}"}
        return {"role": role, "content": self._draw.choice(QUESTIONS).format(number)}

    def _continued(self, asked: Conversation[str]) -> list[str]:
        """The last responses that the conversation goes on from."""
        for count in range(len(asked.origins) - 1, 0, -1):
            said = self._said.get((asked.context, tuple(asked.origins[:count])), ())
            if same := [choice.id for choice in said if not has_other_thought(asked.messages[count - 1], choice)]:
                return same
        return []

    def _remember(self, asked: Conversation[str], choice: Choice) -> None:
        origin = origin_of(choice.message)
        self._said[asked.context, (*asked.origins, origin)].append(choice)
        sent = self._draw.choice(forms_of(choice.message))(choice.message)
        # vLLM's server refuses one that is null.
        sent.pop("name", None)
        self._conversations.append(asked.with_response(sent, origin))

    async def _call(self, call: Call, fields: Message) -> None:
        asked = {"messages": call.asked.messages, **CONTEXTS[call.asked.context]}
        call.fresh = await self._rendered(asked)
        is_left = fields.pop("is_left", False)
        further = {"return_token_ids": True, "chat_template_kwargs": asked.pop("chat_template_kwargs", None)}
        answer: Any = await self._model.chat.completions.create(model="any", **asked, **fields, extra_body=further)
        if not fields.get("stream"):
            call.prompt, call.choices = answer.model_extra["prompt_token_ids"], choices_of(answer, fields["n"])
        elif is_left:
            call.left = await left(answer, fields["n"])
        else:
            await read_stream(answer, call, fields["n"])

    async def _rendered(self, asked: Message) -> list[int]:
        # Of vLLM's routes, this one alone knows reasoning by its new name only.
        messages = [with_new_name(message) for message in asked["messages"]]
        answer = await self._http.post("/v1/tokenize", json={**asked, "messages": messages})
        if answer.is_error:
            raise ValueError(f"The service does not render {asked}: {answer.text}")
        return answer.json()["tokens"]


async def left(stream: AsyncIterator[Any], n: int) -> list[str]:
    """Leaves a stream after its first event."""
    async for chunk in stream:
        await stream.close()  # type: ignore[attr-defined]
        return [name_of(chunk.id, index, n) for index in range(n)]
    return []


async def read_stream(stream: AsyncIterator[Any], call: Call, n: int) -> None:
    choices: dict[int, Choice] = {}
    async for chunk in stream:
        call.prompt = (chunk.model_extra or {}).get("prompt_token_ids") or call.prompt
        for part in chunk.choices:
            add_part(choices.setdefault(part.index, Choice(name_of(chunk.id, part.index, n))), part)
    call.choices = [choice for _, choice in sorted(choices.items())]


def add_part(choice: Choice, part: Any) -> None:
    """Adds what one event has of a choice."""
    delta, message = part.delta, choice.message
    choice.token_ids += (part.model_extra or {}).get("token_ids") or []
    if part.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or ()), *(one.logprob for one in part.logprobs.content or ())]
    message["content"] += delta.content or ""
    if reasoning := (delta.model_extra or {}).get("reasoning"):
        message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
    for call in delta.tool_calls or ():
        calls = message.setdefault("tool_calls", [])
        if call.index == len(calls):
            calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
        function = calls[call.index]["function"]
        function["name"] += call.function.name or ""
        function["arguments"] += call.function.arguments or ""
    choice.finish_reason = part.finish_reason or choice.finish_reason


def choices_of(answer: Any, n: int) -> list[Choice]:
    return [
        Choice(
            name_of(answer.id, choice.index, n),
            choice.model_extra["token_ids"],
            None if choice.logprobs is None else [one.logprob for one in choice.logprobs.content],
            choice.finish_reason,
            message_of(choice.message),
        )
        for choice in answer.choices
    ]


def message_of(answered: Any) -> Message:
    fields: Message = answered.model_dump(exclude_none=True)
    reasoning = fields.pop("reasoning", None) or fields.pop("reasoning_content", None)
    return {"content": "", **fields, **({"reasoning_content": reasoning} if reasoning else {})}


def name_of(answer_id: str, index: int, n: int) -> str:
    return f"{answer_id}-{index}" if n > 1 else answer_id


def forms_of(message: Message) -> list[Any]:
    """Those in which the message may be sent back. vLLM's server refuses arguments that are no text."""
    refused = [parsed]
    try:
        reserialized(message)
    except ValueError:
        refused.append(reserialized)
    return [form for form in FORMS if form not in refused]


def with_new_name(message: Message) -> Message:
    names = {"reasoning_content": "reasoning"}
    return {names.get(name, name): value for name, value in message.items() if name not in names or value is not None}


def has_other_thought(message: Message, choice: Choice) -> bool:
    """Whether the message was sent with a thought that the response does not have: it is another response's, which an
    edit has put here.
    """
    thought = message.get("reasoning_content")
    return bool(thought) and thought != choice.message.get("reasoning_content")


def origin_of(message: Message) -> str:
    """Equal for responses that a harness cannot tell apart once it leaves out their reasoning."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return json.dumps(["assistant", " ".join(message["content"].split()), calls])

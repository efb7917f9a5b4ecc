"""The agents of the benchmark: conversations over chat completions that grow with each call, as OpenAI's clients do it.

With aiohttp and orjson, so that the client takes little of the processors that it shares with the servers.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from benchmarks.openai_loop import JSON, open_session

COMPLETIONS = "/v1/chat/completions"
DATA = b"data: "
DONE = b"[DONE]"
TEXTS = ("content", "reasoning")


@dataclass(frozen=True, slots=True)
class Workload:
    """`agents` conversations at the same time, of `calls` calls each, which each generate `new_tokens` tokens."""

    agents: int
    calls: int
    new_tokens: int

    @property
    def all_calls(self) -> int:
        return self.agents * self.calls

    @property
    def all_tokens(self) -> int:
        return self.all_calls * self.new_tokens


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a call."""

    is_vllm: bool = False
    """To vLLM's own server, and not to the service."""
    streams: bool = False
    has_session: bool = False
    shows_tokens: bool = False
    """Asks for the ids and log-probabilities of all tokens."""


@dataclass(frozen=True, slots=True)
class CallTime:
    """Seconds from the request of one call on."""

    first_s: float
    """To the first bytes of the answer."""
    whole_s: float


@dataclass(frozen=True, slots=True)
class Address:
    """Where an agent calls, with the headers of its calls."""

    url: str
    headers: Mapping[str, str]
    session: str | None = None
    """The URL of its session."""


async def played(url: str, way: Way, workload: Workload, seed: int) -> tuple[float, list[CallTime]]:
    """Plays all conversations. Returns the seconds that they took together, and each call.

    Sessions are opened before and deleted afterwards.
    """
    # New connections each time: while a server is suspended, the other end may have closed those from before.
    async with await open_session(url) as http, addresses(http, url, way, workload.agents) as of_agents:
        began = time.perf_counter()
        conversations = await asyncio.gather(
            *(
                conversation(http, address, way, workload, f"{seed} {number}")
                for number, address in enumerate(of_agents)
            )
        )
        seconds = time.perf_counter() - began
    return seconds, [call for calls in conversations for call in calls]


@asynccontextmanager
async def addresses(http: aiohttp.ClientSession, url: str, way: Way, agents: int) -> AsyncIterator[list[Address]]:
    if not way.has_session:
        yield [Address(url + COMPLETIONS, JSON)] * agents
        return
    opened = [await opened_session(http, url) for _ in range(agents)]
    yield opened
    for address in opened:
        async with http.delete(address.session or ""):
            pass


async def opened_session(http: aiohttp.ClientSession, url: str) -> Address:
    async with http.post(f"{url}/v1/sessions", data=b"{}", headers=JSON) as answer:
        session = orjson.loads(await answer.read())
    path = f"{url}/v1/sessions/{session['id']}"
    return Address(path + COMPLETIONS, {**JSON, "authorization": f"Bearer {session['api_key']}"}, path)


async def conversation(
    http: aiohttp.ClientSession, address: Address, way: Way, workload: Workload, seed: str
) -> list[CallTime]:
    numbers = random.Random(seed)
    messages: list[dict[str, Any]] = []
    calls = []
    for _ in range(workload.calls):
        question = f"What is {numbers.randrange(10**6)} + {numbers.randrange(10**6)}?"
        messages.append({"role": "user", "content": question})
        body = orjson.dumps(body_of(messages, way, workload.new_tokens))
        began = time.perf_counter()
        async with http.post(address.url, data=body, headers=address.headers) as answer:
            parts = [await answer.content.readany()]
            first_s = time.perf_counter() - began
            parts.append(await answer.read())
        calls.append(CallTime(first_s, time.perf_counter() - began))
        message, tokens = (streamed if way.streams else whole)(b"".join(parts))
        if tokens != workload.new_tokens:
            raise RuntimeError(f"A call generated {tokens} tokens, not {workload.new_tokens}.")
        messages.append(message)
    return calls


def body_of(messages: list[dict[str, Any]], way: Way, new_tokens: int) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
    if way.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if way.shows_tokens:
        body |= {"logprobs": True, "return_token_ids": True}
    return body


def whole(answer: bytes) -> tuple[dict[str, Any], int]:
    """The message of an answer, as a client sends it back, and how many tokens it has."""
    fields = orjson.loads(answer)
    return sent_back(fields["choices"][0]["message"]), fields["usage"]["completion_tokens"]


def streamed(answer: bytes) -> tuple[dict[str, Any], int]:
    """As `whole`, of the events of an answer. Raises `RuntimeError` if it has no end."""
    texts, tokens = dict.fromkeys(TEXTS, ""), 0
    lines = [line.removeprefix(DATA) for line in answer.split(b"\n") if line.startswith(DATA)]
    if not lines or lines[-1] != DONE:
        raise RuntimeError(f"A stream broke off: {answer[-200:]!r}")
    for event in map(orjson.loads, lines[:-1]):
        for choice in event["choices"]:
            for name in TEXTS:
                texts[name] += choice["delta"].get(name) or ""
        if usage := event.get("usage"):
            tokens = usage["completion_tokens"]
    return sent_back(texts), tokens


def sent_back(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without empty fields, but with a content: chat templates may need one."""
    return {"role": "assistant", "content": "", **{name: text for name in TEXTS if (text := message.get(name))}}

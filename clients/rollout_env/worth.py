"""Worth of an environment to a policy: how many samples it solves never, sometimes, always. For `certify`."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rollout_env.play import Reply
from rollout_env.records import ChatMessage, JsonObject

MOST_AT_ONCE = 8
"""Rollouts that are played at once."""


@dataclass(frozen=True, slots=True)
class PolicyServer:
    """A model behind OpenAI's `/chat/completions`, such as a rollout service."""

    url: str
    """With `/v1`. The key is in the variable `ROLLOUT_API_KEY`, if there is one."""
    model: str | None = None
    """Its name; None where the server has one."""
    generations: int = 4
    """Rollouts of each sample, at temperature 1."""
    max_tokens: int = 512
    band: tuple[float, float] = (0.0, 1.0)
    """The share of rollouts that must solve their sample: at least, at most."""

    async def reply(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> Reply:
        """The model's next message. Raises `NotCertified`."""
        given = {"model": self.model, "tools": list(tools)}
        body = {"messages": list(messages), "temperature": 1.0, "max_tokens": self.max_tokens}
        body |= {name: value for name, value in given.items() if value}
        answer = await asyncio.to_thread(posted, f"{self.url.rstrip('/')}/chat/completions", body)
        message = answer["choices"][0]["message"]
        further: Any = {name: message[name] for name in ("tool_calls", "reasoning_content") if message.get(name)}
        reply: ChatMessage = {"role": "assistant", "content": message.get("content") or ""}
        return {**reply, **further}


class NotCertified(Exception):
    """A server that is asked for a certificate, or for a policy's reply, gave none. The message is a sentence."""


def posted(url: str, document: Mapping[str, Any]) -> Any:
    """The JSON that a server answers, which gets the key in the variable `ROLLOUT_API_KEY`. Raises `NotCertified`."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("ROLLOUT_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    try:
        with urlopen(Request(url, json.dumps(document).encode(), headers)) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise NotCertified(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise NotCertified(f"{url} does not answer: {error}.") from error


def shares(solved: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Shares of samples, from 0 to 1, by how many of a sample's rollouts have solved it; and of rollouts that did.

    Samples that all rollouts solve, or none, teach nothing: their advantages are 0.
    """
    counts = [sum(of_sample) for of_sample in solved]
    pairs = list(zip(counts, map(len, solved), strict=True))
    by_count = {
        "solved_by_none": [count == 0 for count, _ in pairs],
        "solved_by_one": [count == 1 < size for count, size in pairs],
        "solved_by_some": [1 < count < size for count, size in pairs],
        "solved_by_all": [count == size for count, size in pairs],
        "teaches": [0 < count < size for count, size in pairs],
    }
    of_samples = {kind: sum(those) / len(solved) for kind, those in by_count.items()}
    return {**of_samples, "solved": sum(counts) / sum(map(len, solved))}

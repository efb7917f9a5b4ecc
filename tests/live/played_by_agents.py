"""Agents of OpenAI's client, and a game, which a service in the tests runs for its rollouts."""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import openai

from rollout_client.contract.rollouts import SampleInput


async def asks_twice(base_url: str, api_key: str, sample: SampleInput) -> dict[str, float]:
    """Asks, and asks whether it is sure. Its reward says which tokens it was answered with."""
    messages: list[Any] = [message.model_dump(exclude_unset=True) for message in sample.messages or ()]
    ask: Any = {"model": "any", "extra_body": {"return_token_ids": True}}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
        first = await model.chat.completions.create(messages=messages, **ask)
        messages += [
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": "Are you sure?"},
        ]
        second = await model.chat.completions.create(messages=messages, **ask)
    prompt: Sequence[int] = (second.model_extra or {})["prompt_token_ids"]
    ids = [*prompt, *(second.choices[0].model_extra or {})["token_ids"]]
    return {"calls": 2.0, "tokens": len(ids), "digest": digest_of(ids)}


def digest_of(token_ids: Sequence[int]) -> float:
    return float(crc32(repr([*token_ids]).encode()) % 2**20)


async def shows_its_sample(base_url: str, api_key: str, sample: SampleInput) -> float:
    """Sends the messages of its sample as they are, with a further one beside them, and then shows the image again."""
    messages: list[Any] = [message.model_dump(exclude_unset=True) for message in sample.messages or ()]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
        aside = [*messages, {"role": "user", "content": "Beside it?"}]
        await model.chat.completions.create(model="any", messages=aside)
        first = await model.chat.completions.create(model="any", messages=messages)
        again = {"role": "user", "content": [{"type": "text", "text": "Again: "}, messages[0]["content"][-1]]}
        messages += [first.choices[0].message.model_dump(exclude_none=True), again]
        await model.chat.completions.create(model="any", messages=messages)
    return 1.0


class Echo:
    """Two players hear each other, twice each; the one who begins wins."""

    def __init__(self, seed: int) -> None:
        self._said = [f"Game {seed}."]

    def turn(self) -> tuple[int, str] | None:
        moves = len(self._said) - 1
        return None if moves == 4 else (moves % 2, f"You hear: {self._said[-1]}")

    def move(self, text: str) -> None:
        self._said.append(text)

    def rewards(self) -> Mapping[int, float]:
        return {0: 1.0, 1: -1.0}

"""Agents of a soak: sessions with calls of the model server's API, and calls without a session."""

from collections import Counter
from typing import Any, NamedTuple

import httpx2
from openai import APIError, APIStatusError, AsyncOpenAI

from rollout_client import AsyncRolloutClient, SampleInput
from rollout_client.contract.rollouts import Sampling
from rollout_client.contract.sessions import SessionLimits

TASK_NAME = "math"
"""Whose environment judges the sessions."""
ANY = "any"
"""A name that nobody looks at: of the model in a session, and of the key of a service without keys."""
CALLS = 4
WITH_IDS = {"return_token_ids": True}
SAMPLING = Sampling(max_new_tokens=24)
IDLE_S = 60.0
"""Of a session that has ended: after it the record is dropped, so that there are soon as many as there will ever be."""
CALL_RETRIES = 20
"""Of OpenAI's client, at most 8 s apart: a proxy is back before the last one."""
BROKEN = (APIError, httpx2.TransportError)
"""How a stream ends with the ingress or the engine under it. An error with a status is none of these."""


class Answer(NamedTuple):
    """Of one call: its text, and the ids of its tokens."""

    text: str
    ids: list[int]


class SessionLoad:
    """Counts into `ended` what ended well, by its kind, and keeps in `problems` what was wrong with the rest."""

    def __init__(self, client: AsyncRolloutClient, url: str, ended: Counter[str], problems: list[str]) -> None:
        """Args: `url` is the service's address."""
        self._client = client
        self._url = url
        self._ended = ended
        self._problems = problems

    async def session(self, number: int) -> None:
        """One agent's run: a conversation that grows, with every other answer as a stream, judged by its task."""
        [sample] = await self._client.example_samples(TASK_NAME, 1, seed=number)
        limits = SessionLimits(idle_s=IDLE_S)
        async with self._client.sessions.open(sample=sample, sampling=SAMPLING, limits=limits) as session:
            address: Any = {"base_url": session.base_url, "api_key": session.api_key}
            async with AsyncOpenAI(**address, max_retries=CALL_RETRIES) as model:
                answers = await self._conversation(model, sample)
            await session.judge()
            recorded = [message.token_ids for branch in await session.samples() for message in branch.message_log]
        lost = [answer for answer in answers if answer.ids not in recorded]
        self._problems += [f"session {number}: its record has no answer {answer}" for answer in lost]
        self._ended["sessions"] += 1

    async def leave_call(self, number: int) -> None:
        """A call without a session, whose client goes away within the answer."""
        async with AsyncOpenAI(base_url=f"{self._url}/v1", api_key=ANY, max_retries=CALL_RETRIES) as model:
            try:
                served = (await model.models.list()).data[0]
                messages = [{"role": "user", "content": f"Question {number}"}]
                await self._streamed(model, messages, served.id, most_events=2)
            except APIStatusError:
                raise
            except BROKEN:
                self._ended["broken calls"] += 1
        self._ended["calls that were left"] += 1

    async def _conversation(self, model: AsyncOpenAI, sample: SampleInput) -> list[Answer]:
        """Plays it, and returns the answers that came back whole."""
        messages: list[Any] = [message.model_dump(exclude_unset=True) for message in sample.messages or ()]
        answers = []
        for call in range(CALLS):
            try:
                answer = await (self._streamed if call % 2 else self._whole)(model, messages, ANY)
            except APIStatusError:
                raise
            except BROKEN:
                # A stream goes through one replica of the ingress and one of the engine, and ends with them.
                self._ended["broken calls"] += 1
                continue
            answers.append(answer)
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": f"Again, {call}."}]
        return answers

    async def _whole(self, model: AsyncOpenAI, messages: list[Any], name: str) -> Answer:
        answer = await model.chat.completions.create(model=name, messages=messages, extra_body=WITH_IDS)
        [choice] = answer.choices
        return Answer(choice.message.content or "", (choice.model_extra or {})["token_ids"])

    async def _streamed(
        self, model: AsyncOpenAI, messages: list[Any], name: str, most_events: int | None = None
    ) -> Answer:
        text, ids, events = "", list[int](), 0
        asked: Any = {"model": name, "messages": messages, "stream": True, "extra_body": WITH_IDS}
        async with await model.chat.completions.create(**asked) as stream:
            async for event in stream:
                for choice in event.choices:
                    text += choice.delta.content or ""
                    ids += (choice.model_extra or {}).get("token_ids") or []
                events += 1
                if events == most_events:
                    break
        return Answer(text, ids)

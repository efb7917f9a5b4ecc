"""An agent that the service runs: it asks the model, asks whether it is sure, and lets the environment judge."""

from typing import Any

from openai import AsyncOpenAI

from rollout_client import SampleInput


async def agent(base_url: str, api_key: str, sample: SampleInput) -> None:
    messages: list[Any] = [message.model_dump(exclude_unset=True) for message in sample.messages or ()]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
        answer = await model.chat.completions.create(model="any", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "Are you sure? Give your last answer."})
        await model.chat.completions.create(model="any", messages=messages)

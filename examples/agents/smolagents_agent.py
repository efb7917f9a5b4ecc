"""An agent of smolagents with a tool. The library blocks, so that it runs in a thread."""

import asyncio

from smolagents import OpenAIModel, ToolCallingAgent, tool

from examples.agents.calculator import calculator
from rollout_client import SampleInput


async def agent(base_url: str, api_key: str, sample: SampleInput) -> None:
    model = OpenAIModel("any", api_base=base_url, api_key=api_key)
    solver = ToolCallingAgent([tool(calculator)], model, max_steps=4, verbosity_level=0)
    assert sample.messages is not None
    await asyncio.to_thread(solver.run, sample.messages[-1].content)

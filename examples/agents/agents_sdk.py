"""An agent of OpenAI's Agents SDK with a tool, by the Responses API or by chat completions."""

from typing import Any

from agents import Agent, Model, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from examples.agents.calculator import calculator
from rollout_client import SampleInput

# Without it, what the agent does is sent to OpenAI.
PRIVATE = RunConfig(tracing_disabled=True)


async def agent(base_url: str, api_key: str, sample: SampleInput) -> None:
    """By the Responses API, which is the default of the SDK."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await Runner.run(solver(OpenAIResponsesModel("any", client)), question(sample), run_config=PRIVATE)


async def chat_agent(base_url: str, api_key: str, sample: SampleInput) -> None:
    """By chat completions, streamed."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel("any", client)
        run = Runner.run_streamed(solver(model), question(sample), run_config=PRIVATE)
        async for _event in run.stream_events():
            pass


def solver(model: Model) -> Agent[None]:
    return Agent(name="solver", model=model, tools=[function_tool(calculator)])


def question(sample: SampleInput) -> Any:
    return [{"role": message.role, "content": message.content} for message in sample.messages or ()]

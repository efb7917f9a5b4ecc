"""An agent of LangChain, which is a graph of LangGraph: the model, its tool, and the way back."""

from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from examples.agents.calculator import calculator
from rollout_client import SampleInput


async def agent(base_url: str, api_key: str, sample: SampleInput) -> None:
    model = ChatOpenAI(model="any", base_url=base_url, api_key=api_key)
    graph = create_agent(model, tools=[calculator])
    messages: list[Any] = [{"role": message.role, "content": message.content} for message in sample.messages or ()]
    await graph.ainvoke({"messages": messages}, {"recursion_limit": 16})

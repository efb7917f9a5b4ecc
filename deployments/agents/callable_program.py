"""An agent that is a Python function of this process."""

import importlib
import inspect
from typing import Any

from deployments.agents.programs import AgentCall, AgentProgram, LastSaid, last_of, reward_of
from deployments.failures import AgentFailed, EnvironmentLost
from rollout_client.agent_runner import Agent
from rollout_client.contract import SampleInput
from rollout_env import TemporaryFailure


class AgentNotLoadable(Exception):
    """The config names an agent that cannot be run. The message is a sentence."""


class CallableProgram(AgentProgram):
    def __init__(self, import_path: str) -> None:
        """Raises `AgentNotLoadable`."""
        self._agent = load_agent(import_path)

    async def run(self, call: AgentCall, said: LastSaid) -> dict[str, float]:  # noqa: ARG002 - a function says nothing
        sample = SampleInput.model_validate(call.sample)
        try:
            reward: Any = await self._agent(f"{call.base_url}/v1", call.api_key, sample)
        except TemporaryFailure as error:
            raise EnvironmentLost(f"The agent cannot be run just now: {last_of(str(error))}") from error
        except Exception as error:
            raise AgentFailed(f"The agent raised {type(error).__name__}: {last_of(str(error))}") from error
        return reward_of(reward, "What the agent returned")


def load_agent(import_path: str) -> Agent:
    """Raises `AgentNotLoadable`: nothing can be imported from there, or it is no async function of three arguments."""
    module_name, _, name = import_path.partition(":")
    if not (module_name and name):
        raise AgentNotLoadable(f"{import_path!r} is no import path: write package.module:function.")
    try:
        agent = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise AgentNotLoadable(f"{import_path} cannot be imported: {type(error).__name__}: {error}.") from error
    if not (callable(agent) and is_async(agent)):
        raise AgentNotLoadable(
            f"{import_path} is no async function: write async def {name}(base_url, api_key, sample)."
        )
    try:
        inspect.signature(agent).bind("base_url", "api_key", "sample")
    except TypeError as error:
        raise AgentNotLoadable(f"{import_path} must take base_url, api_key and sample: {error}.") from error
    return agent  # type: ignore[no-any-return]


def is_async(agent: Any) -> bool:
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004

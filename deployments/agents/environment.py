"""Runs the agent of one task, each run as the one step of an environment.

The host of environments (`deployments/environments/host.py`) so gives agents all that it gives environments: replicas
that scale with what runs, queues, batches, abortion, heartbeats and draining (`host.py`).
"""

import asyncio
from typing import Any

from deployments.agents.callable_program import CallableProgram
from deployments.agents.command_program import CommandProgram
from deployments.agents.harness_program import HarnessProgram
from deployments.agents.programs import AgentCall, AgentProgram, LastSaid
from deployments.agents.settings import AgentSettings
from deployments.failures import AgentTimedOut
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment

COMMANDS_AT_ONCE = 16
"""Of a replica, unless the config says how many."""
SECONDS = "agent_s"
"""The metric with the wall time of a run."""
ENDED_WITHIN_S = 1.0
"""A function that ignores its cancellation for longer goes on unheard."""
HOST_GRACE_S = 30.0
"""After the end of a run's time, in which the program ends it. Then the host gives the run up."""


class AgentRunsOfTask(TaskEnvironment):
    """Its step is a whole run: `extra_env_info` says what for, and the outcome's reward is the agent's own."""

    description = "Runs the agent of a task."
    ExtraEnvInfo = AgentCall

    def __init__(self, settings: AgentSettings) -> None:
        """Raises `AgentNotLoadable`, `SandboxUnusable` or `HarnessKeyMissing`."""
        self.max_concurrent_steps = settings.max_concurrent_runs
        if self.max_concurrent_steps is None and settings.command is not None:
            self.max_concurrent_steps = COMMANDS_AT_ONCE
        self._program = program_of(settings)
        self._timeout_s = settings.timeout_s

    async def step(self, message_log: list[ChatMessage], extra_env_info: AgentCall) -> StepOutcome:  # noqa: ARG002
        """Runs the agent. An outcome with a reward `{}` is that of an agent that gives none.

        Raises:
            AgentFailed: it failed, or was ended after its time.
            EnvironmentLost: it cannot be run just now.
        """
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        reward = await self._run(extra_env_info)
        return StepOutcome(None, reward, terminated=True, metrics={SECONDS: loop.time() - begun_at})

    async def _run(self, call: AgentCall) -> dict[str, float]:
        said = LastSaid()
        running = asyncio.create_task(self._program.run(call, said))
        try:
            await asyncio.wait([running], timeout=self._timeout_s)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([running], timeout=ENDED_WITHIN_S)
            raise
        if running.done():
            return running.result()
        running.cancel()
        await asyncio.wait([running], timeout=ENDED_WITHIN_S)
        if running.done() and not running.cancelled() and running.exception() is None:
            return running.result()
        raise AgentTimedOut(f"The agent was ended after {self._timeout_s:g} s, its timeout_s. {said.sentence}".strip())

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"extra_env_info": {"base_url": "http://127.0.0.1", "api_key": "", "sample": {}}}] * count


def program_of(settings: AgentSettings) -> AgentProgram:
    """Raises `AgentNotLoadable`, `SandboxUnusable` or `HarnessKeyMissing`."""
    if settings.import_path is not None:
        return CallableProgram(settings.import_path)
    if settings.command is not None:
        return CommandProgram(settings.command)
    assert settings.harness is not None
    return HarnessProgram(settings.harness)

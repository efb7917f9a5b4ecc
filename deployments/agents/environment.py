"""Runs the agents of one task as an environment whose one step is a whole run.

Its deployment is a host of environments (`deployments/environments/host.py`), so agents get replicas that scale with
what runs, queues, batches, cancellation, heartbeats and draining. Steps may last for hours, and end with their caller.
`PlainAgentTask` is the environment of a task whose agent brings everything.
"""

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict

from deployments.agents.command_program import CommandProgram
from deployments.agents.game_program import GameProgram
from deployments.agents.harbor_program import HarborProgram
from deployments.agents.programs import AgentCall, AgentProgram, CallableProgram, HarnessProgram, RunNotes
from deployments.agents.settings import AgentSettings
from deployments.failures import AgentTimedOut
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment

RUNS_OF_TASK = f"{__name__}:AgentRunsOfTask"
"""Import path of the environment that the host loads."""
SECONDS = "agent_s"
"""The metric with the wall time of a run."""
ENDED_WITHIN_S = 1.0
"""Time limit for a cancelled run to end; a function that takes longer is abandoned."""
HOST_GRACE_S = 30.0
"""Extra time after a run's timeout in which its program ends it, before the host fails the step."""


class AgentRunsOfTask(TaskEnvironment):
    """A step is a whole run: `extra_env_info` is the call, and the reward is the agent's own."""

    description = "Runs the agent of a task."
    ExtraEnvInfo = AgentCall

    def __init__(self, settings: AgentSettings) -> None:
        """Raises `AgentNotLoadable`, `ProviderUnusable`, `HarborTaskRefused` or `KeyMissing`."""
        places = settings.places
        # As many more have their sandboxes made, in the order in which they get a place.
        self.max_concurrent_steps = 2 * places if settings.harbor is not None and places is not None else places
        self._program = _program_of(settings)
        self._timeout_s = settings.timeout_s

    async def step(self, message_log: list[ChatMessage], extra_env_info: AgentCall) -> StepOutcome:  # noqa: ARG002
        """Runs the agent. An outcome with a reward `{}` is that of an agent that gives none.

        Raises:
            AgentFailed: it failed, or was ended after its time.
            EnvironmentLost: it cannot be run just now.
        """
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        said = RunNotes()
        reward = await self._run(extra_env_info, said)
        return StepOutcome(None, reward, terminated=True, metrics={**said.metrics, SECONDS: loop.time() - begun_at})

    async def _run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        running = asyncio.create_task(self._program.run(call, said))
        try:
            async with asyncio.timeout(self._timeout_s) as said.limit:
                await asyncio.wait([running])
        except TimeoutError:
            pass
        finally:
            if is_late := not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=ENDED_WITHIN_S)
        if not is_late or (running.done() and not running.cancelled() and running.exception() is None):
            return running.result()
        raise AgentTimedOut(f"The agent was ended after {self._timeout_s:g} s, its timeout_s. {said.sentence}".strip())

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"extra_env_info": {"base_url": "http://127.0.0.1", "api_key": "", "sample": {}}}] * count


def _program_of(settings: AgentSettings) -> AgentProgram:
    """Raises `AgentNotLoadable`, `ProviderUnusable`, `HarborTaskRefused` or `KeyMissing`."""
    if settings.harbor is not None:
        return HarborProgram(settings, settings.harbor)
    if settings.import_path is not None:
        return CallableProgram(settings.import_path)
    if settings.command is not None:
        return CommandProgram(settings.command)
    if settings.game is not None:
        return GameProgram(settings.game)
    assert settings.harness is not None
    return HarnessProgram(settings.harness)


class AnyInfo(BaseModel):
    """Fields for the agent, whatever they are."""

    model_config = ConfigDict(extra="allow")


class PlainAgentTask(TaskEnvironment):
    """Describes the task for `GET /tasks`. Its samples come from the task's `data`, or from whoever posts them."""

    description = "Played by an agent, which says what its rollouts are worth."
    ExtraEnvInfo = AnyInfo

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:  # noqa: ARG002
        """Is never called. Raises `SampleRejected`."""
        raise SampleRejected("This task judges nothing: its agent gives the reward.")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        numbers = range(seed, seed + count)
        return [
            {"messages": [{"role": "user", "content": f"Question {number}"}], "extra_env_info": {}}
            for number in numbers
        ]

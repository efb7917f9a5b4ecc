"""The deployment that runs the agents of one task: a host whose steps may last for hours, and end with their caller.

`RemoteAgentRuns` (`service/remote/agent_runs.py`) is the caller.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.agents.caller_leases import CallerLeases
from deployments.agents.environment import HOST_GRACE_S
from deployments.agents.settings import AgentSettings
from deployments.environments.host import EnvironmentHost
from deployments.failures import EnvironmentLost
from deployments.protocols import StepRequest, StepResults

RUNS_OF_TASK = "deployments.agents.environment:AgentRunsOfTask"
LEASE_S = 15.0
"""An ingress replica that is busy may say nothing for seconds."""
TICK_S = 1.0
CALLER_GONE = EnvironmentLost("The agent was ended: the ingress replica that had it run was not heard of any more.")


class AgentHost(EnvironmentHost):
    """One replica."""

    def __init__(self, name: str, settings: AgentSettings) -> None:
        """Raises `EnvironmentNotLoadable`: the agent cannot be run."""
        super().__init__(name, RUNS_OF_TASK, {"settings": settings}, settings.timeout_s + HOST_GRACE_S)
        self._leases = CallerLeases(LEASE_S)
        self._ticking: asyncio.Task[None] | None = None

    async def step(self, requests: list[StepRequest], caller: str = "") -> AsyncGenerator[StepResults, None]:
        """See `EnvironmentHost.step`. The runs end when their caller was not `heard` of for `LEASE_S` seconds."""
        run_ids = [request.step_id for request in requests]
        self._leases.begin(caller, run_ids, asyncio.get_running_loop().time())
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        try:
            async with aclosing(super().step(requests, caller)) as items:
                async for results in items:
                    yield results
        finally:
            self._leases.end(caller, run_ids)

    async def heard(self, caller: str) -> None:
        """The caller lives."""
        self._leases.heard(caller, asyncio.get_running_loop().time())

    async def _tick(self) -> None:
        while len(self._leases):
            await asyncio.sleep(TICK_S)
            self._steps.give_up(self._leases.lost(asyncio.get_running_loop().time()), CALLER_GONE)
        self._ticking = None

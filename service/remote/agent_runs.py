"""The deployment that runs the agents of one task, over its Serve handle. Server half: `deployments/agents/host.py`."""

import asyncio
from contextlib import suppress
from contextvars import Context
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import EnvironmentLost
from deployments.protocols import StepRequest
from rollout_env import StepOutcome
from service.remote.environment import RemoteEnvironment

HEARD_EVERY_S = 1.0
HEARD_WITHIN_S = 5.0


class RemoteAgentRuns(RemoteEnvironment):
    """Each step is a run. The replicas hear of this ingress replica as long as it has runs."""

    def __init__(self, name: str, handle: DeploymentHandle[Any]) -> None:
        super().__init__(name, handle)
        self._running = 0
        self._hearing: asyncio.Task[None] | None = None

    async def step(self, request: StepRequest) -> StepOutcome:
        self._running += 1
        if self._hearing is None:
            # An empty context: the calls must not end with the HTTP request that happened to be the first.
            self._hearing = asyncio.create_task(self._keep_heard(), context=Context())
        try:
            return await super().step(request)
        finally:
            self._running -= 1

    async def _keep_heard(self) -> None:
        while self._running:
            await asyncio.sleep(HEARD_EVERY_S)
            await asyncio.gather(*(self._tell(replica) for replica in self.replicas()))
        self._hearing = None

    async def _tell(self, replica: str) -> None:
        # A replica that is gone has no runs. The runs of one that hangs are given up by the batcher.
        with suppress(EnvironmentLost, TimeoutError):
            async with asyncio.timeout(HEARD_WITHIN_S):
                await self._result(self._handle.options(session_id=replica).heard.remote(self._caller))

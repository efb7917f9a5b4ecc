"""The `Environment` port over Serve handles. Server half: `deployments/environments/host.py`."""

from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import EnvironmentLost
from deployments.protocols import Environment, StepRequest, TaskDescription
from deployments.rpc.handle_calls import call_result
from rollout_env import StepOutcome
from service.remote.batching import RequestBatcher


class RemoteEnvironment(Environment):
    """Sends the steps of one task, in batches, to whichever replicas Serve picks."""

    def __init__(self, task_name: str, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._who = f"The replica of environment {task_name!r}"
        self._steps: RequestBatcher[StepRequest, StepOutcome] = RequestBatcher(
            handle.options(stream=True).step.remote,
            EnvironmentLost,
            self._who,
            log_fields={"task_name": task_name},
        )

    async def step(self, request: StepRequest) -> StepOutcome:
        return await self._steps.call(request)

    async def describe(self) -> TaskDescription:
        description: TaskDescription = await self._result(self._handle.describe.remote())
        return description

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = await self._result(self._handle.example_samples.remote(count, seed))
        return samples

    async def _result(self, response: Any) -> Any:
        return await call_result(response, response, EnvironmentLost, self._who)

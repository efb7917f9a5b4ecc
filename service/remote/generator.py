"""The `Generator` protocol over Serve handles."""

import asyncio
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationCut, GenerationLost, Overloaded
from deployments.protocols import (
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
)
from deployments.rpc.handle_calls import call_result
from deployments.rpc.live_replicas import replicas_behind
from service.remote.batching import RequestBatcher
from service.remote.replica_affinity import ReplicaAffinity

THE_GENERATOR = "The generator replica"


class RemoteGenerator(Generator):
    """The `Generator` protocol: each conversation on the replica that has its prefix."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._homes = ReplicaAffinity()
        self._replicas: dict[str | None, RequestBatcher[GenerationRequest, Generation]] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        there = replicas_behind(self._handle)
        home = self._homes.home_of(request.rollout_id, request.group, there)
        if home not in self._replicas:
            self._replicas = {name: hop for name, hop in self._replicas.items() if name in there}
            self._replicas[home] = self._generations_on(home)
        try:
            return await self._replicas[home].ask(request)
        except GenerationCut:
            raise
        except (GenerationLost, Overloaded, asyncio.CancelledError):
            # Cancelled where it took too long: the next try must not find the same engine stuck.
            self._homes.lost(request.rollout_id)
            raise

    def _generations_on(self, home: str | None) -> RequestBatcher[GenerationRequest, Generation]:
        there = self._handle.options(session_id=home or "")
        start = there.options(stream=True).generate.remote
        return RequestBatcher(start, GenerationLost, THE_GENERATOR, give_up=partial(end_generations, there))

    def release(self, rollout_id: str) -> None:
        self._homes.release(rollout_id)

    async def describe(self) -> GeneratorDescription:
        response: Any = self._handle.describe.remote()
        description: GeneratorDescription = await call_result(response, response, GenerationLost, THE_GENERATOR)
        return description


def end_generations(there: DeploymentHandle[Any], requests: list[GenerationRequest]) -> Any:
    return there.abort.remote([request.request_id for request in requests])

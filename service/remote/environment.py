"""Environments and their tasks' data: the ports `Environment` and `DataReader` over Serve handles.

Server halves: `deployments/environments/host.py`, `deployments/data/store.py`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

from ray.serve.handle import DeploymentHandle

from deployments.data.rows import DataReader
from deployments.failures import DataLost, EnvironmentLost
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.generation import Environment
from deployments.rpc.background_tasks import SharedCalls
from deployments.rpc.batching import (
    BYTES_PER_RECORD,
    MOST_ITEMS_PER_MESSAGE,
    BatchResults,
    CallBatcher,
    bytes_of_json,
    divided,
)
from deployments.rpc.handle_calls import StoreClient, call_result, live_replicas_of
from deployments.upstream.ray_serve.own_replica import own_name
from deployments.upstream.ray_serve.serve_internals import cancel_call
from rollout_client.contract.selection import SampleRange
from rollout_env import StepOutcome
from rollout_env.certify import PanelSettings
from service.remote.replica_stream import MOST_ITERATIONS_PER_CALL, ReplicaWatch, control_calls, streamed_calls
from service.remote.step_spreading import StepSpreading

logger = logging.getLogger("rollout_service.remote")


LOST_AFTER_HEARTBEATS = 30
"""A step that computes without `await` may stall its replica's event loop for so long; a hung replica stalls for ever.
"""

DESCRIBED_AGAIN_WITHIN_S = 5.0


class _Destination(NamedTuple):
    """The batch of a step. Steps in lockstep have batches of their own, which only their bytes divide."""

    replica: str | None
    """`None` if no replica is known."""
    in_lockstep: bool


class RemoteEnvironment(Environment):
    """Sends each step of one task to a replica with the least load, batched with others for it.

    The steps of one turn of a request in lockstep go to one replica: in one call, unless they are larger than a message
    may be; then in as few as possible. Where rollouts have sessions, all steps of a rollout go to the replica that has
    its session.
    """

    def __init__(self, task_name: str, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._task_name = task_name
        self._who = f"The replica of environment {task_name!r}"
        self._client = StoreClient(handle, EnvironmentLost, self._who)
        self._caller = own_name()
        self._spreading = StepSpreading()
        self._learning = SharedCalls(lambda _: self.describe())
        self._known: TaskDescription | None = None
        self._known_of: Sequence[str] = ()
        """The replicas that it had when it described itself so."""
        self._steps: dict[_Destination, CallBatcher[StepRequest, StepOutcome]] = {}
        self._releases: dict[str, CallBatcher[str, None]] = {}
        """By replica."""
        self._silences: WeakValueDictionary[str, ReplicaWatch] = WeakValueDictionary()
        """By replica, each as long as a call has it, also while its replica is not listed."""

    async def step(self, request: StepRequest) -> StepOutcome:
        lockstep_id = request.lockstep_id
        if not live_replicas_of(self._handle):
            # Serve tells a handle its replicas at its first call.
            await self._learning.result()
        # A request asks for the descriptions of its tasks before it plays them.
        has_sessions = self._known is not None and self._known.has_sessions
        in_session = has_sessions and not request.is_start
        live = live_replicas_of(self._handle)
        if in_session:
            replica = self._spreading.begin_in_session(live, request.session_id)
        else:
            replica = self._spreading.begin(live, lockstep_id)
        steps = self._steps_of(_Destination(replica, in_lockstep=bool(lockstep_id) and not in_session))
        try:
            return await steps.call(request)
        except EnvironmentLost:
            if replica is not None:
                self._spreading.mark_failed(replica)
            if in_session:
                # A replica that lives has closed it with the step. A retry may go anywhere.
                self.release(request.session_id)
            raise
        finally:
            if replica is not None and not in_session:
                self._spreading.end(replica, lockstep_id)

    def release(self, session_id: str) -> None:
        replica = self._spreading.release(session_id)
        if replica is not None and replica in live_replicas_of(self._handle):
            if replica not in self._releases:
                release = self._handle.options(session_id=replica).release.remote
                log_fields = {"task_name": self._task_name, "replica_id": replica}
                self._releases[replica] = control_calls(release, "released", EnvironmentLost, self._who, log_fields)
            self._releases[replica].add(session_id)

    async def describe(self) -> TaskDescription:
        return cast(TaskDescription, await self._client.describe())

    async def certify(self, settings: PanelSettings) -> dict[str, Any]:
        document: dict[str, Any] = await self._client.certify(settings)
        return document

    def replicas(self) -> Sequence[str]:
        return live_replicas_of(self._handle)

    async def answer(self, replica: str) -> None:
        await StoreClient(self._handle.options(session_id=replica), EnvironmentLost, self._who).answer()

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        """Asks about as many samples at once as a message may hold, until one is refused."""
        first = 0
        for asked in divided(list(extra_env_infos), bytes_of_json):
            refused: list[RefusedField] = await self._client.refused_fields(asked)
            if refused:
                return [replace(field, place=first + field.place) for field in refused]
            first += len(asked)
        return []

    async def known_description(self) -> TaskDescription:
        """Asks again when the replicas have changed: an update may change the task. Without an answer, the known
        description is kept."""
        replicas, known = live_replicas_of(self._handle), self._known
        if known is not None and replicas == self._known_of:
            return known
        try:
            async with asyncio.timeout(None if known is None else DESCRIBED_AGAIN_WITHIN_S):
                description = await self.describe()
        except (EnvironmentLost, TimeoutError) as error:
            if known is None:
                raise
            extra = {"task_name": self._task_name}
            logger.warning("%s did not describe itself after a change.", self._who, exc_info=error, extra=extra)
            description = known
        self._known, self._known_of = description, replicas or live_replicas_of(self._handle)
        return description

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], await self._client.example_samples(count, seed))

    def _steps_of(self, destination: _Destination) -> CallBatcher[StepRequest, StepOutcome]:
        if (known := self._steps.get(destination)) is not None:
            return known
        replicas = live_replicas_of(self._handle)
        self._steps = {known: steps for known, steps in self._steps.items() if known.replica in replicas}
        self._releases = {replica: releases for replica, releases in self._releases.items() if replica in replicas}
        self._spreading.forget_all_but(replicas)
        name = destination.replica or ""
        named = self._handle.options(session_id=name)
        start_call = named.options(stream=True).step.remote
        log_fields = {"task_name": self._task_name, "replica_id": destination.replica}
        abort = control_calls(named.abort.remote, "aborted", EnvironmentLost, self._who, log_fields)
        self._steps[destination] = steps = streamed_calls(
            lambda requests: start_call(requests, self._caller, name),
            EnvironmentLost,
            self._who,
            log_fields,
            partial(self._results_of, destination.replica),
            self._silences.setdefault(name, ReplicaWatch(LOST_AFTER_HEARTBEATS)),
            _bytes_of_step_request,
            lambda request: abort.add(request.step_id),
            most_items=None if destination.in_lockstep else MOST_ITEMS_PER_MESSAGE,
            # The schedule lets many of them begin in consecutive iterations.
            most_iterations=None if destination.in_lockstep else MOST_ITERATIONS_PER_CALL,
        )
        return steps

    def _results_of(self, replica: str | None, results: BatchResults[StepOutcome]) -> BatchResults[StepOutcome]:
        if replica is not None:
            self._spreading.note_answer(replica)
        return results


_DATA = "The deployment that holds the data of the tasks"


class RemoteData(DataReader):
    """Asks any replica: all hold the same."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._store = StoreClient(handle, DataLost, _DATA)

    async def sizes(self) -> dict[str, dict[str, int]]:
        return cast(dict[str, dict[str, int]], await self._store.sizes())

    async def revision(self, wanted: SampleRange) -> str:
        return str(await self._store.revision(wanted.task_name, wanted.split, wanted.seed))

    async def samples(self, wanted: SampleRange, most_bytes: int) -> AsyncGenerator[bytes, None]:
        stream: Any = self._handle.options(stream=True).samples.remote(
            wanted.task_name, wanted.split, wanted.start, wanted.count, wanted.seed, most_bytes
        )
        parts = aiter(stream)
        try:
            while part := await call_result(anext(parts, b""), stream, DataLost, _DATA):
                yield part
        finally:
            cancel_call(stream)


def _bytes_of_step_request(request: StepRequest) -> int:
    return BYTES_PER_RECORD + bytes_of_json((request.message_log, request.extra_env_info))

"""Scripted Serve handles and streaming calls, for the ports over them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.generation import GenerationRequest, GenerationResults
from deployments.protocols.replicas import ReplicaLoad
from tests.service.scripted import DESCRIPTION, outcome

LOAD = ReplicaLoad(7, 3, 1000)


class ScriptedCall:
    """A streaming call. Each second it yields the next batch of its script, or raises it if it is an exception."""

    def __init__(self, batches: Sequence[Any], never_answers: bool = False) -> None:
        self._batches = list(batches)
        self._never_answers = never_answers
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(3600 if self._never_answers else 1)
        if not self._batches:
            raise StopAsyncIteration
        batch = self._batches.pop(0)
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedResponse:
    """The response of a call with one result, which it gives after a second, or raises if it is an exception."""

    def __init__(self, result: Any) -> None:
        self._result = result
        self.cancelled = False

    def __await__(self) -> Any:
        yield from asyncio.sleep(1).__await__()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedEnvironmentHandle:
    """Each call of `step` has the next batches of the script, or is refused with its exception.

    Without a script all steps of a call have an outcome after a second, and the replica says that it has no others.
    """

    def __init__(self, *script: Any) -> None:
        self._script = list(script)
        self.requests: list[list[StepRequest]] = []
        self.stepped: list[tuple[str, list[str]]] = []
        """The replica that each call names, and the ids of its steps."""
        self.aborted: list[tuple[str, list[str]]] = []
        self.released: list[tuple[str, list[str]]] = []
        """The replica that each call names, and the sessions that it releases."""
        self.deployment_id = object()
        self.calls: list[ScriptedCall] = []
        self.examples_asked: list[tuple[int, int]] = []
        self.describe = SimpleNamespace(
            remote=lambda: ScriptedResponse(TaskDescription("task", "A scripted task.", fields={}))
        )
        self.example_samples = SimpleNamespace(remote=self._example_samples)
        self.checked: list[list[dict[str, Any]]] = []
        """The samples of each call of `refused_fields`."""
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _: False
        self.refused_fields = SimpleNamespace(remote=self._refused_fields)

    def options(self, *, session_id: str) -> "NamedEnvironmentHandle":
        return NamedEnvironmentHandle(self, session_id)

    def start_steps(self, replica: str, requests: list[StepRequest]) -> ScriptedCall:
        self.requests.append(requests)
        self.stepped.append((replica, [request.step_id for request in requests]))
        outcomes = [[(place, outcome()) for place in range(len(requests))]]
        batches: Any = self._script.pop(0) if self._script else outcomes
        if isinstance(batches, Exception):
            raise batches
        self.calls.append(ScriptedCall(list(batches)))
        return self.calls[-1]

    def abort(self, replica: str, step_ids: list[str]) -> ScriptedResponse:
        self.aborted.append((replica, step_ids))
        return ScriptedResponse(None)

    def release(self, replica: str, session_ids: list[str]) -> ScriptedResponse:
        self.released.append((replica, session_ids))
        return ScriptedResponse(None)

    def _refused_fields(self, extra_env_infos: list[dict[str, Any]]) -> ScriptedResponse:
        self.checked.append(extra_env_infos)
        places = [place for place, info in enumerate(extra_env_infos) if self.refuses(info)]
        return ScriptedResponse([RefusedField(place, ("count",), "wrong") for place in places])

    def _example_samples(self, count: int, seed: int) -> ScriptedResponse:
        self.examples_asked.append((count, seed))
        return ScriptedResponse([{"task_name": "task"}] * count)


class NamedEnvironmentHandle:
    """An environment handle whose calls name a replica."""

    def __init__(self, handle: ScriptedEnvironmentHandle, replica: str) -> None:
        self.step = SimpleNamespace(remote=lambda requests, _caller, _named: handle.start_steps(replica, requests))
        self.abort = SimpleNamespace(remote=lambda step_ids: handle.abort(replica, step_ids))
        self.release = SimpleNamespace(remote=lambda session_ids: handle.release(replica, session_ids))

    def options(self, *, stream: bool) -> "NamedEnvironmentHandle":
        assert stream
        return self


class ScriptedGeneratorHandle:
    """All generations of a call have the same `result` after a second, or never one if it is `None`.

    A call raises `raised`, if that is set.
    """

    def __init__(self, result: Any = None, abort_result: Any = None) -> None:
        self._result = result
        self._abort_result = abort_result
        self.raised: Exception | None = None
        self.generated: list[tuple[str, list[str]]] = []
        """The replica that each call names, and its requests."""
        self.requests: list[GenerationRequest] = []
        self.callers: list[str] = []
        self.waiting: list[int] = []
        self.aborted: list[tuple[str, list[str]]] = []
        self.interrupted: list[tuple[str, list[str]]] = []
        self.interrupt_result: Exception | None = None
        self.taken_out: list[tuple[str, str]] = []
        self.take_out_result: Exception | None = None
        self.events: list[tuple[str, list[str]]] = []
        """Calls in the order in which they arrived, with the ids of their generations."""
        self.calls: list[ScriptedCall] = []
        self.deployment_id = object()
        self.describe = SimpleNamespace(remote=lambda: ScriptedResponse(DESCRIPTION))

    def options(self, *, session_id: str) -> "NamedHandle":
        return NamedHandle(self, session_id)

    def generate(self, replica: str, requests: list[GenerationRequest]) -> ScriptedCall:
        generation_ids = [request.generation_id for request in requests]
        self.generated.append((replica, generation_ids))
        self.events.append(("generate", generation_ids))
        self.requests += requests
        results = [(place, self._result) for place in range(len(requests))]
        batches = [GenerationResults(results, LOAD) if self.raised is None else self.raised]
        self.calls.append(ScriptedCall(batches, never_answers=self._result is None))
        return self.calls[-1]

    def interrupt(self, replica: str, generation_ids: list[str]) -> ScriptedResponse:
        self.interrupted.append((replica, generation_ids))
        self.events.append(("interrupt", generation_ids))
        return ScriptedResponse(self.interrupt_result)

    def take_out_of_service(self, replica: str, reason: str) -> ScriptedResponse:
        self.taken_out.append((replica, reason))
        return ScriptedResponse(self.take_out_result)

    def abort(self, replica: str, generation_ids: list[str]) -> ScriptedResponse:
        self.aborted.append((replica, generation_ids))
        return ScriptedResponse(self._abort_result)


class NamedHandle:
    """A generator handle whose calls name a replica."""

    def __init__(self, handle: ScriptedGeneratorHandle, replica: str) -> None:
        self.generate = SimpleNamespace(remote=partial(self._generate, handle))
        self.serve = SimpleNamespace(remote=None)
        self.abort = SimpleNamespace(remote=lambda generation_ids: handle.abort(replica, generation_ids))

        self.interrupt = SimpleNamespace(remote=partial(handle.interrupt, replica))
        self.take_out_of_service = SimpleNamespace(remote=partial(handle.take_out_of_service, replica))
        self._replica = replica

    def _generate(
        self, handle: ScriptedGeneratorHandle, requests: list[GenerationRequest], caller: str, waiting: int, _named: str
    ) -> ScriptedCall:
        handle.callers.append(caller)
        handle.waiting.append(waiting)
        return handle.generate(self._replica, requests)

    def options(self, *, stream: bool) -> "NamedHandle":
        assert stream
        return self

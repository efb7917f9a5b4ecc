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
TASK = TaskDescription("task", "A scripted task.", fields={})


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


class ScriptedHandle:
    """A Serve handle: a call of a method comes to `on_` and its name, after the replica that it names."""

    def __init__(self) -> None:
        self.deployment_id = object()
        self.calls: list[ScriptedCall] = []
        self.aborted: list[tuple[str, list[str]]] = []
        """The replica that each call of `abort` names, and the ids; so for the others."""

    def options(self, *, session_id: str = "", stream: bool = False) -> "NamedHandle":
        del stream
        return NamedHandle(self, session_id)

    def start(self, batches: Any, never_answers: bool = False) -> ScriptedCall:
        self.calls.append(ScriptedCall(batches, never_answers))
        return self.calls[-1]

    def on_abort(self, replica: str, ids: list[str]) -> ScriptedResponse:
        self.aborted.append((replica, ids))
        return ScriptedResponse(None)


class NamedHandle:
    """A handle whose calls name a replica."""

    def __init__(self, handle: ScriptedHandle, replica: str) -> None:
        self._handle = handle
        self._replica = replica

    def options(self, *, stream: bool) -> "NamedHandle":
        assert stream
        return self

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._handle, f"on_{method}")(self._replica, *arguments)


class ScriptedEnvironmentHandle(ScriptedHandle):
    """Each call of `step` has the next batches of the script, or is refused with its exception.

    Without a script all steps of a call have an outcome after a second, and the replica says that it has no others.
    """

    def __init__(self, *script: Any) -> None:
        super().__init__()
        self._script = list(script)
        self.requests: list[list[StepRequest]] = []
        self.stepped: list[tuple[str, list[str]]] = []
        self.released: list[tuple[str, list[str]]] = []
        self.examples_asked: list[tuple[int, int]] = []
        self.describe = SimpleNamespace(remote=lambda: ScriptedResponse(TASK))
        self.example_samples = SimpleNamespace(remote=self._example_samples)
        self.checked: list[list[dict[str, Any]]] = []
        """The samples of each call of `refused_fields`."""
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _: False
        self.refused_fields = SimpleNamespace(remote=self._refused_fields)

    def on_step(self, replica: str, requests: list[StepRequest], _caller: str, _named: str) -> ScriptedCall:
        self.requests.append(requests)
        self.stepped.append((replica, [request.step_id for request in requests]))
        outcomes = [[(place, outcome()) for place in range(len(requests))]]
        batches: Any = self._script.pop(0) if self._script else outcomes
        if isinstance(batches, Exception):
            raise batches
        return self.start(batches)

    def on_release(self, replica: str, session_ids: list[str]) -> ScriptedResponse:
        self.released.append((replica, session_ids))
        return ScriptedResponse(None)

    def _refused_fields(self, extra_env_infos: list[dict[str, Any]]) -> ScriptedResponse:
        self.checked.append(extra_env_infos)
        places = [place for place, info in enumerate(extra_env_infos) if self.refuses(info)]
        return ScriptedResponse([RefusedField(place, ("count",), "wrong") for place in places])

    def _example_samples(self, count: int, seed: int) -> ScriptedResponse:
        self.examples_asked.append((count, seed))
        return ScriptedResponse([{"task_name": "task"}] * count)


class ScriptedGeneratorHandle(ScriptedHandle):
    """All generations of a call have the same `result` after a second, or never one if it is `None`.

    A call raises `raised`, if that is set.
    """

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result
        self.raised: Exception | None = None
        self.generated: list[tuple[str, list[str]]] = []
        self.requests: list[GenerationRequest] = []
        self.waiting: list[int] = []
        self.interrupted: list[tuple[str, list[str]]] = []
        self.taken_out: list[tuple[str, str]] = []
        self.take_out_result: Exception | None = None
        self.events: list[tuple[str, list[str]]] = []
        """Calls in the order in which they arrived, with the ids of their generations."""
        self.describe = SimpleNamespace(remote=lambda: ScriptedResponse(DESCRIPTION))

    def on_generate(
        self, replica: str, requests: list[GenerationRequest], _caller: str, waiting: int, _named: str
    ) -> ScriptedCall:
        generation_ids = [request.generation_id for request in requests]
        self.generated.append((replica, generation_ids))
        self.events.append(("generate", generation_ids))
        self.requests += requests
        self.waiting.append(waiting)
        results = [(place, self._result) for place in range(len(requests))]
        batches = [GenerationResults(results, LOAD) if self.raised is None else self.raised]
        return self.start(batches, never_answers=self._result is None)

    def on_interrupt(self, replica: str, generation_ids: list[str]) -> ScriptedResponse:
        self.interrupted.append((replica, generation_ids))
        self.events.append(("interrupt", generation_ids))
        return ScriptedResponse(None)

    def on_take_out_of_service(self, replica: str, reason: str) -> ScriptedResponse:
        self.taken_out.append((replica, reason))
        return ScriptedResponse(self.take_out_result)

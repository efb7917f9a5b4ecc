"""Serve handles of real replica objects that live in the test's own process: both halves of the calls are real."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from deployments.failures import RolloutFailure
from deployments.generation.generator_replica_base import GeneratorReplicaBase
from deployments.protocols.generation import Engine, GenerationRequest
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from deployments.rpc.handle_calls import record_live_replicas


class TimedEngine(Engine):
    """An engine of a test's own: `generate` is left to its class."""

    description = GeneratorDescription("timed", max_model_len=10, vocab_size=2)
    ongoing = 1

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        raise NotImplementedError

    def describe(self) -> GeneratorDescription:
        return self.description

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(self.ongoing)


class ReadyReplica(GeneratorReplicaBase):
    def refuse_other_weights(self, request: GenerationRequest) -> None:
        """Every generation may be made with its weights."""


class InProcessStream:
    """A streaming call. Nothing of it arrives while its replica hangs."""

    def __init__(self, items: AsyncGenerator[Any, None], answers: asyncio.Event) -> None:
        self._items = items
        self._answers = answers
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> "InProcessStream":
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._items)
        await self._answers.wait()
        return item

    def cancel(self) -> None:
        self._closing = asyncio.create_task(self._items.aclose())


class InProcessResponse:
    """The response of a call with one result."""

    def __init__(self, result: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.ensure_future(result)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class InProcessHandle:
    """Calls the replica that a call names; the first one, if that one is not there, as the router of a handle does."""

    def __init__(self, replicas: Mapping[str, Any]) -> None:
        self.deployment_id = object()
        self._replicas = dict(replicas)
        self._answers = {name: asyncio.Event() for name in replicas}
        for name in replicas:
            self.set_hanging(name, False)
        self.list_replicas(*replicas)

    @property
    def unchecked(self) -> Any:
        """Itself, where a handle of Serve's type is expected."""
        return self

    def list_replicas(self, *names: str) -> None:
        """Callers are told that these replicas take calls."""
        record_live_replicas(self.deployment_id, names)

    def set_hanging(self, name: str, is_hanging: bool) -> None:
        if is_hanging:
            self._answers[name].clear()
        else:
            self._answers[name].set()

    def options(self, *, session_id: str = "", stream: bool = False) -> "NamedInProcessHandle":
        return NamedInProcessHandle(self, session_id, stream)

    def __getattr__(self, method: str) -> SimpleNamespace:
        return getattr(self.options(), method)  # type: ignore[no-any-return]

    def call(self, replica: str, stream: bool, method: str, *arguments: Any) -> Any:
        name = replica if replica in self._replicas else next(iter(self._replicas))
        result = getattr(self._replicas[name], method)(*arguments)
        return InProcessStream(result, self._answers[name]) if stream else InProcessResponse(result)


class NamedInProcessHandle:
    """A handle with options."""

    def __init__(self, handle: InProcessHandle, replica: str, stream: bool) -> None:
        self._handle = handle
        self._replica = replica
        self._stream = stream

    def options(self, *, stream: bool) -> "NamedInProcessHandle":
        return NamedInProcessHandle(self._handle, self._replica, stream)

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(
            remote=lambda *arguments: self._handle.call(self._replica, self._stream, method, *arguments)
        )

"""The `Generator` port over Serve handles. Server half: `deployments/generation/generator_replica_base.py`."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import monotonic, time
from typing import Any
from weakref import WeakValueDictionary

from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost, OtherVersionLoaded, Overloaded, RolloutFailure
from deployments.protocols.generation import Generation, GenerationRequest, GenerationResults, Generator, ScoringRequest
from deployments.protocols.images import ImageTokens
from deployments.protocols.model_server import (
    CallsToAbort,
    ModelServer,
    ServedPart,
    ServedParts,
    ServedRequest,
    ServedTokens,
)
from deployments.protocols.replicas import GeneratorDescription
from deployments.protocols.weight_versions import RollingActivation
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.rpc.batching import BatchResults, CallBatcher, bytes_of_generation_request, bytes_of_served_request
from deployments.rpc.handle_calls import StoreClient, live_replicas_of
from deployments.upstream.ray_serve.own_replica import own_name
from service.remote.replica_stream import ReplicaWatch, call_unless_gone, control_calls, streamed_calls
from service.rollouts.progress import UNOBSERVED, RolloutObserver
from service.rollouts.retries import pause_s
from service.scheduling.fair_queue import as_check
from service.scheduling.replicas import ScheduledGeneration
from service.scheduling.scheduler import GenerationScheduler
from service.scheduling.window import EngineCapacity

LOST_AFTER_HEARTBEATS = 10
"""A replica's event loop can stall for seconds, while it reads weights or compiles; a hung one stalls for ever."""
REPLICA_REFRESH_S = 0.2
"""Interval of checks for started and ended replicas while generations wait."""
TRY_SUSPECTS_S = 5.0
"""Time after which a generation tries a replica again that keeps failing: a fault may pass."""
SERVE_RETRIES = 3
"""Retries of a call without any part of an answer, on another replica where there is one."""
_NOTHING_YET = Generation([], [], "abort")
"""The result of a generation that was interrupted before it was sent."""
_GENERATOR_REPLICA = "The generator replica"


@dataclass(frozen=True, slots=True)
class _ReplicaCalls:
    """The calls of one generator replica."""

    generate: CallBatcher[GenerationRequest, Generation]
    serve: CallBatcher[ServedRequest, ServedTokens]
    interrupt: CallBatcher[str, None]


@dataclass(slots=True)
class _End:
    """How a generation has ended at its replica."""

    new_tokens: int | None = None
    """`None` if it is not known."""
    failed: bool = False
    """Whether the replica is at fault."""


class RemoteGenerator(Generator, ModelServer):
    """Sends each generation, batched with others, when and where the scheduler says."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        window_factor: float | None = None,
        idle_program_s: float | None = None,
        observer: RolloutObserver = UNOBSERVED,
    ) -> None:
        """Knows no replica at first.

        Args:
            window_factor: that of `GenerationScheduler`.
            idle_program_s: that of `scheduling`.
        """
        self._handle = handle
        self._scheduler = GenerationScheduler(window_factor, keeps_places=idle_program_s is not None)
        self._idle_program_s = math.inf if idle_program_s is None else idle_program_s
        self._others_passed_at = monotonic()
        self._replicas: tuple[str, ...] = ()
        """The replicas that the scheduler knows."""
        self._looking_for_replicas: asyncio.TimerHandle | None = None
        self._failed: set[str] = set()
        """Replicas that have failed a generation within `TRY_SUSPECTS_S`."""
        self._calls: dict[str, _ReplicaCalls] = {}
        """By replica."""
        self._silences: WeakValueDictionary[str, ReplicaWatch] = WeakValueDictionary()
        """By replica, each as long as a call has it, also while its replica is not listed."""
        self._waiting: dict[str, ScheduledGeneration] = {}
        """By rollout."""
        self._turns: dict[ScheduledGeneration, asyncio.Future[None]] = {}
        """A future for each generation that waits; done when it starts or is interrupted."""
        self._interrupted: set[ScheduledGeneration] = set()
        """Generations that were interrupted before they were sent."""
        self._running: dict[str, tuple[_ReplicaCalls, GenerationRequest]] = {}
        """By rollout."""
        self._parts: dict[str, asyncio.Queue[ServedPart | None]] = {}
        """Parts of the answers to calls of model servers' APIs, by generation; `None` is the end."""
        self._caller = own_name()
        self._observer = observer
        self._tasks = BackgroundTasks()

    async def generate(self, request: GenerationRequest) -> Generation:
        self._look_for_replicas()
        scheduled = self._scheduler.submit(request)
        began_at, began = time(), monotonic()
        turn = began
        if not scheduled.has_started:
            await self._wait(scheduled)
            turn = monotonic()
            self._observer.took("queue", turn - began)
            if scheduled in self._interrupted:
                self._interrupted.remove(scheduled)
                return _NOTHING_YET
        if request.replica not in ("", scheduled.replica):
            self._end(scheduled, _End())
            raise GenerationLost(f"Generator replica {request.replica} takes no calls: it has ended, or is replaced.")
        calls = self._calls_of(scheduled.replica)
        self._running[request.rollout_id] = calls, request
        with self._noting_end(scheduled) as end:
            try:
                made = await calls.generate.call(replace(request, virtual_time=scheduled.virtual_time))
            finally:
                del self._running[request.rollout_id]
            end.new_tokens, end.failed = len(made.token_ids), made.failure is not None
            if made.token_ids:
                self._note_recomputed(scheduled, scheduled.prompt_tokens - 1, made.cached_tokens)
        return replace(
            made, replica=scheduled.replica, began_at=began_at, waited_s=turn - began, took_s=monotonic() - turn
        )

    async def serve(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        for attempt in count():
            started = False
            # The one before may still run, if its replica only seemed to be lost: what ends it must not end this one.
            name = f"{request.generation_id}.{attempt}" if attempt else request.generation_id
            try:
                async with aclosing(self._serve(replace(request, generation_id=name))) as parts:
                    async for part in parts:
                        started = True
                        yield part
                return
            except RolloutFailure as failure:
                if started or not failure.retryable or attempt == SERVE_RETRIES:
                    raise
            await asyncio.sleep(pause_s(attempt))

    async def _serve(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        self._look_for_replicas()
        scheduled = self._scheduler.submit(request)
        if not scheduled.has_started:
            await self._turn(scheduled)
        parts = self._parts[request.generation_id] = asyncio.Queue()
        sent = replace(request, virtual_time=scheduled.virtual_time, age_s=monotonic() - request.received_at)
        answering = asyncio.create_task(self._calls_of(scheduled.replica).serve.call(sent))
        answering.add_done_callback(partial(_note_end, parts))
        with self._noting_end(scheduled) as end:
            try:
                while (part := await parts.get()) is not None:
                    yield part
                tokens = await answering
                end.new_tokens = tokens.generated
                if tokens.generated:
                    scheduled.prompt_tokens = tokens.context
                    self._note_recomputed(scheduled, tokens.context - max(tokens.prompt, 1), tokens.cached)
            finally:
                answering.cancel()
                del self._parts[request.generation_id]

    async def abort_calls(self, calls: CallsToAbort) -> None:
        asked = [self._client(replica).abort_calls(calls) for replica in self.replicas()]
        done = await asyncio.gather(*asked, return_exceptions=True)
        # The calls of a replica that is gone have ended with it; its failure is told if no other one has answered.
        failures = [one for one in done if isinstance(one, BaseException)]
        if failures and len(failures) == len(done):
            raise failures[0]

    def note_rolling(self, rolling: RollingActivation | None) -> None:
        """Sends generations from now on to replicas with a version that they accept; `None`: all have the same."""
        self._wake(self._scheduler.set_rolling(rolling))

    def is_generating(self, rollout_id: str) -> bool:
        return rollout_id in self._running

    @property
    def waiting_generations(self) -> int:
        """The number of generations that wait for an engine."""
        return self._scheduler.waiting

    def programs(self) -> Mapping[str, tuple[int, int]]:
        """By replica, how many idle rollouts keep a place in its KV cache, and how many are parked and wait for one."""
        return {replica: self._scheduler.programs_at(replica) for replica in self._replicas}

    @property
    def waiting_by_weight(self) -> Mapping[float, int]:
        """The number of waiting generations by the weight of their request's priority."""
        return self._scheduler.waiting_by_weight

    def interrupt(self, rollout_id: str) -> bool:
        if (waiting := self._waiting.get(rollout_id)) is not None:
            if waiting not in self._interrupted:
                self._interrupted.add(waiting)
                if waiting in self._turns:
                    self._scheduler.cancel(waiting)
                    self._resolve(waiting)
                else:
                    # It has started in this iteration of the event loop.
                    self._wake(self._scheduler.end(waiting))
            return True
        if rollout_id not in self._running:
            return False
        calls, request = self._running[rollout_id]
        calls.generate.send_now()
        calls.interrupt.add(request.generation_id)
        return True

    def release(self, rollout_id: str) -> None:
        self._scheduler.release(rollout_id)

    async def describe(self) -> GeneratorDescription:
        self._look_for_replicas()
        description: GeneratorDescription = await self._client().describe()
        self._wake(self._scheduler.set_capacity(EngineCapacity.of(description)))
        return description

    async def image_tokens(self, names: Sequence[str]) -> list[ImageTokens]:
        tokens: list[ImageTokens] = await self._client().image_tokens([*names])
        return tokens

    def replicas(self) -> Sequence[str]:
        return live_replicas_of(self._handle)

    async def answer(self, replica: str) -> None:
        await self._client(replica).answer()

    async def score_on(self, replica: str, request: ScoringRequest) -> Generation:
        return await self.generate_on(replica, as_check(request))

    async def generate_on(self, replica: str, request: GenerationRequest) -> Generation:
        try:
            return await self.generate(replace(request, replica=replica))
        finally:
            self.release(request.rollout_id)

    def take_out_of_service(self, replica: str, reason: str) -> None:
        tell = partial(self._handle.options(session_id=replica).take_out_of_service.remote, reason)
        not_done, log_fields = "The replica was not taken out of service", {"replica_id": replica}
        self._tasks.start(call_unless_gone(tell, GenerationLost, _GENERATOR_REPLICA, not_done, log_fields), Context())

    async def _wait(self, scheduled: ScheduledGeneration) -> None:
        """Returns when the generation has started or was interrupted. Cancelling this takes it out of the queue."""
        rollout_id = scheduled.request.rollout_id
        self._waiting[rollout_id] = scheduled
        try:
            await self._turn(scheduled)
        finally:
            del self._waiting[rollout_id]

    async def _turn(self, scheduled: ScheduledGeneration) -> None:
        turn = self._turns[scheduled] = asyncio.get_running_loop().create_future()
        self._look_again_soon()
        try:
            await turn
        except asyncio.CancelledError:
            self._interrupted.discard(scheduled)
            if self._turns.pop(scheduled, None) is not None:
                self._scheduler.cancel(scheduled)
            elif scheduled.has_started:
                self._wake(self._scheduler.end(scheduled))
            raise

    @contextmanager
    def _noting_end(self, scheduled: ScheduledGeneration) -> Iterator[_End]:
        """Ends the generation, however the block ends, which runs it."""
        end = _End()
        try:
            yield end
        except OtherVersionLoaded:
            # Another replica may have the version; this one has not failed.
            self._scheduler.leave_replica(scheduled.request.rollout_id)
            raise
        except (GenerationLost, Overloaded):
            end.failed = True
            raise
        finally:
            self._end(scheduled, end)

    def _note_recomputed(self, scheduled: ScheduledGeneration, had: int, cached: int) -> None:
        if tokens := scheduled.recomputed(had, cached):
            self._observer.recomputed(scheduled.replica, tokens)

    def _end(self, scheduled: ScheduledGeneration, end: _End) -> None:
        if end.new_tokens:
            self._observer.generated(scheduled.request.share.weight, end.new_tokens)
        self._wake(self._scheduler.end(scheduled, end.new_tokens, replica_failed=end.failed))
        if end.failed and scheduled.replica not in self._failed:
            self._failed.add(scheduled.replica)
            asyncio.get_running_loop().call_later(TRY_SUSPECTS_S, self._let_try, scheduled.replica)

    def _let_try(self, replica: str) -> None:
        self._failed.discard(replica)
        self._wake(self._scheduler.let_try(replica))

    def _wake(self, started: Iterable[ScheduledGeneration]) -> None:
        for scheduled in started:
            self._resolve(scheduled)

    def _resolve(self, scheduled: ScheduledGeneration) -> None:
        turn = self._turns.pop(scheduled)
        if not turn.done():
            turn.set_result(None)

    def _look_for_replicas(self) -> None:
        replicas = live_replicas_of(self._handle)
        if replicas is self._replicas:
            return
        self._replicas = replicas
        self._wake(self._scheduler.set_replicas(replicas))
        self._calls = {name: calls for name, calls in self._calls.items() if name in replicas}

    def _look_again_soon(self) -> None:
        if self._looking_for_replicas is None:
            self._looking_for_replicas = asyncio.get_running_loop().call_later(REPLICA_REFRESH_S, self._look_again)

    def _look_again(self) -> None:
        self._looking_for_replicas = None
        self._look_for_replicas()
        self._wake(self._scheduler.fill_all())
        if monotonic() - self._others_passed_at >= self._idle_program_s:
            self._others_passed_at = monotonic()
            self._wake(self._scheduler.let_others_pass())
        if self._turns:
            self._look_again_soon()

    def _client(self, replica: str = "") -> StoreClient:
        """The methods of this replica; of whichever Serve chooses, if it is empty."""
        handle = self._handle.options(session_id=replica) if replica else self._handle
        return StoreClient(handle, GenerationLost, _GENERATOR_REPLICA)

    def _calls_of(self, replica: str) -> _ReplicaCalls:
        if (calls := self._calls.get(replica)) is not None:
            return calls
        named = self._handle.options(session_id=replica)
        silence = self._silences.setdefault(replica, ReplicaWatch(LOST_AFTER_HEARTBEATS))
        streaming = named.options(stream=True)
        failing = GenerationLost, _GENERATOR_REPLICA, {"replica_id": replica or None}
        abort = control_calls(named.abort.remote, "aborted", *failing)

        def abandon(request: GenerationRequest) -> None:
            abort.add(request.generation_id)

        def stream(
            start: Callable[..., Any], results_of: Callable[..., Any], bytes_of: Callable[[Any], int]
        ) -> CallBatcher[Any, Any]:
            def start_call(requests: list[Any]) -> Any:
                return start(requests, self._caller, self._scheduler.waiting_for(replica), replica)

            return streamed_calls(start_call, *failing, partial(results_of, replica), silence, bytes_of, abandon)

        calls = self._calls[replica] = _ReplicaCalls(
            stream(streaming.generate.remote, self._results_of, bytes_of_generation_request),
            stream(streaming.serve.remote, self._ends_of, bytes_of_served_request),
            control_calls(named.interrupt.remote, "interrupted", *failing),
        )
        return calls

    def _results_of(self, replica: str, item: GenerationResults | ServedParts) -> BatchResults[Any]:
        self._wake(self._scheduler.observe(replica, item.load, ended=len(item.results)))
        return item.results

    def _ends_of(self, replica: str, item: ServedParts) -> BatchResults[ServedTokens]:
        for generation_id, part in item.parts:
            # Those of a call that was left are dropped.
            if (parts := self._parts.get(generation_id)) is not None:
                parts.put_nowait(part)
        return self._results_of(replica, item)


def _note_end(parts: "asyncio.Queue[ServedPart | None]", answering: "asyncio.Task[ServedTokens]") -> None:
    parts.put_nowait(None)
    if not answering.cancelled():
        # A caller that has left does not retrieve the failure; asyncio would log that.
        answering.exception()

"""Calls of the ingress that every generator replica takes, over any `Engine`: batches of generations, and aborts.

`RemoteGenerator` (`service/remote/generator.py`) is the caller.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

from ray.serve import metrics

from deployments.failures import (
    GenerationLost,
    GenerationNotFinite,
    GenerationRejected,
    ReplicaShuttingDown,
    RolloutFailure,
)
from deployments.generation.health import OutputHealth
from deployments.protocols.generation import Engine, Generation, GenerationRequest, GenerationResults, ScoredPrompt
from deployments.protocols.images import ImageTokens
from deployments.protocols.model_server import ServedPart, ServedParts, ServedRequest, ServedTokens
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from deployments.rpc.autoscaling import stats_of
from deployments.rpc.batching import (
    BYTES_PER_LOGPROB,
    BYTES_PER_RECORD,
    BYTES_PER_TOKEN_ID,
    bytes_of_columns,
    bytes_of_text,
    divided,
    results_as_completed,
)
from deployments.rpc.liveness import CallerWatch, Heartbeats, Listener

_HAND_OVER_EVERY_S = 0.5
logger = logging.getLogger("rollout_service.rpc")


class GeneratorReplicaBase(ABC):
    """Runs generations on the replica's engine; `GeneratorReplica` and a benchmark's simulated one inherit from it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, asyncio.Task[object]] = {}
        self._heartbeats = Heartbeats()
        self._callers_watch = CallerWatch(self._give_up)
        self._shutting_down = False
        self._output_health = OutputHealth()
        # Serve adds the replica's id to each metric.
        self._not_finite = metrics.Counter(
            "rollout_generations_not_finite",
            description="Generations with log-probabilities that are NaN or infinite; each was tried again.",
        )
        self._waiting: dict[str, int] = {}
        """By caller: generations that wait there for this replica."""
        self._virtual_time = 0
        self._ended_generations = 0

    async def generate(
        self, requests: list[GenerationRequest], caller: str = "", waiting: int = 0, named: str = ""
    ) -> AsyncGenerator[GenerationResults, None]:
        """Runs the generations concurrently and yields each result as soon as it is there.

        The results of one event-loop iteration are yielded together. A failure is the result of its own generation
        alone. Every `HEARTBEAT_S` seconds a caller gets an item without results, on one of its streams with the same
        `named`.

        Args:
            caller: the same for all calls of one ingress replica, and different from all others'.
            waiting: generations that wait in the caller for this replica.
            named: the replica that the call named.
        """
        aborted = GenerationLost("The generation was aborted.")
        jobs = [self._generation_or_failure(request) for request in requests]
        with self._open_stream(Listener(caller, named), requests, waiting) as wake:
            async with aclosing(results_as_completed(jobs, aborted, _bytes_of_generation, wake)) as batches:
                async for results in batches:
                    yield GenerationResults(results, self.load())

    async def serve(
        self, requests: list[ServedRequest], caller: str = "", waiting: int = 0, named: str = ""
    ) -> AsyncGenerator[ServedParts, None]:
        """Answers calls of a model server's API concurrently, each in parts, the last of which has its tokens.

        The parts of one event-loop iteration are yielded together. Failures, heartbeats and arguments are as those of
        `generate`.
        """
        aborted = GenerationLost("The call was aborted.")
        made: list[tuple[str, ServedPart]] = []
        with self._open_stream(Listener(caller, named), requests, waiting) as wake:

            def add(call_id: str, part: ServedPart) -> None:
                made.append((call_id, part))
                if part.tokens is None:
                    # The last part goes with the end of the call, which comes at once.
                    wake.set()

            jobs = [self._tokens_or_failure(request, partial(add, request.generation_id)) for request in requests]
            async with aclosing(results_as_completed(jobs, aborted, lambda _: BYTES_PER_RECORD, wake)) as batches:
                async for results in batches:
                    *before, last = divided(made, _bytes_of_served_part) if made else [made]
                    made = []
                    for parts in before:
                        yield ServedParts(parts, [], self.load())
                    yield ServedParts(last, results, self.load())

    def answer_call(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:  # noqa: ARG002 - has none
        """Yields the parts of an answer. Raises `GenerationRejected` where the engine has no serving layers."""
        raise GenerationRejected("The engine answers no calls of OpenAI's and Anthropic's APIs.")

    async def abort(self, generation_ids: list[str]) -> None:
        """Aborts generations that nobody waits for, while others of their batch go on. Unknown ids are ignored."""
        self._give_up(generation_ids)

    def _give_up(self, generation_ids: Sequence[str]) -> None:
        """Cancels those that run; a session records what its call has generated."""
        for generation_id in generation_ids:
            task = self._running.get(generation_id)
            if task is not None and not task.cancelling():
                task.cancel()

    async def interrupt(self, generation_ids: list[str]) -> None:
        """Lets generations return with the tokens that they have, as `finish_reason` "abort". Ignores unknown ids."""
        await self._engine.interrupt(generation_ids)

    async def take_out_of_service(self, reason: str) -> None:
        """Refuses new generations from now on; the next health check fails, and Serve replaces the replica."""
        if self._output_health.distrusted is None:
            self._output_health.distrusted = reason
            logger.error("The replica is out of service: %s.", reason)

    def drain(self, bound_s: float) -> None:
        """Refuses new generations, and interrupts after `bound_s` seconds those that still run.

        The callers get `ReplicaShuttingDown` with the tokens so far, and go on at other replicas.
        """
        self._shutting_down = True
        self._handing_over = asyncio.get_running_loop().create_task(self._hand_over(bound_s))

    async def _hand_over(self, bound_s: float) -> None:
        await asyncio.sleep(bound_s)
        # Again and again, because a call reaches the engine some time after it has come in.
        while self._running:
            await self._engine.interrupt([*self._running], _replica_shuts_down())
            await asyncio.sleep(_HAND_OVER_EVERY_S)

    async def describe(self) -> GeneratorDescription:
        return self._engine.describe()

    async def image_tokens(self, names: list[str]) -> list[ImageTokens]:
        """The tokens of images, as `Engine.image_tokens`, whose failures it raises."""
        return await self._engine.image_tokens(names)

    async def answer(self) -> None:
        """Returns if it would take a generation now; implementations extend it.

        Raises:
            ReplicaShuttingDown: Serve shuts it down.
            GenerationLost: it is out of service, and will be replaced.
        """
        self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._shutting_down:
            raise _replica_shuts_down()
        if self._output_health.distrusted is not None:
            raise GenerationLost("The generator replica was taken out of service; it is being replaced.")

    async def ongoing_generations(self) -> int:
        """Generations that run or wait in the engine's queue."""
        return self._engine.load().ongoing_generations

    async def ended_generations(self) -> int:
        """Generations that have ended here without a failure."""
        return self._ended_generations

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Counts generations that wait in the ingress for this replica too: they are what further replicas are for."""
        in_progress = self._engine.load().ongoing_generations + sum(self._waiting.values())
        return stats_of(in_progress, self._engine.describe().max_num_seqs)

    def load(self) -> ReplicaLoad:
        return replace(self._engine.load(), ingresses=len(self._heartbeats.callers), virtual_time=self._virtual_time)

    async def check_health(self) -> None:
        """Raises what broke the replica, which Serve then replaces. Implementations extend it.

        Raises:
            ReplicaUnusable: as `OutputHealth.check`.
        """
        self._output_health.check()

    @abstractmethod
    def refuse_other_weights(self, request: GenerationRequest) -> None:
        """Refuses a generation that other weights must make than the replica has.

        Raises:
            OtherVersionLoaded: they are older than `min_weight_version`, or are not `weight_version`.
        """

    @contextmanager
    def _open_stream(
        self, listener: Listener, requests: Sequence[GenerationRequest], waiting: int
    ) -> Iterator[asyncio.Event]:
        """For the length of the block the caller has these under way. The event wakes the stream, as heartbeats do."""
        caller = listener.caller
        self._waiting[caller] = waiting
        wake = asyncio.Event()
        ids = [request.generation_id for request in requests]
        try:
            with self._heartbeats.open_stream(listener, wake), self._callers_watch.working(caller, ids):
                yield wake
        finally:
            if caller not in self._heartbeats.callers:
                self._waiting.pop(caller, None)

    async def _generation_or_failure(self, request: GenerationRequest) -> Generation | RolloutFailure:
        try:
            with self._abortable(request):
                generation = await self._engine.generate(request)
        except Exception as error:  # noqa: BLE001 - is the result of this generation alone
            return self._failure_of(request, error)
        self._output_health.record(request.group, is_finite=True)
        return generation

    async def _tokens_or_failure(
        self, request: ServedRequest, add: Callable[[ServedPart], None]
    ) -> ServedTokens | RolloutFailure:
        """Answers a call. Args: `add` takes each part of the answer."""
        tokens = ServedTokens()
        try:
            with self._abortable(request):
                async with aclosing(self.answer_call(request)) as parts:
                    async for part in parts:
                        add(part)
                        tokens = part.tokens or tokens
        except Exception as error:  # noqa: BLE001 - is the result of this call alone
            return self._failure_of(request, error)
        return tokens

    @contextmanager
    def _abortable(self, request: GenerationRequest) -> Iterator[None]:
        """The block is the generation of the current task, which ends without a failure unless it raises.

        Raises what refuses the generation.
        """
        task = asyncio.current_task()
        assert task is not None
        self._running[request.generation_id] = task
        try:
            self._refuse_if_closed()
            self.refuse_other_weights(request)
            yield
            self._virtual_time = max(self._virtual_time, request.virtual_time)
            self._ended_generations += 1
        finally:
            # A retry of the same generation has the same id and may have replaced this task.
            if self._running.get(request.generation_id) is task:
                del self._running[request.generation_id]

    def _failure_of(self, request: GenerationRequest, error: Exception) -> RolloutFailure:
        if isinstance(error, RolloutFailure):
            if isinstance(error, GenerationNotFinite):
                self._output_health.record(request.group, is_finite=False)
                self._not_finite.inc()
            return error
        logger.warning("A generation broke.", exc_info=error, extra=request.log_fields)
        # Its class may not exist where the result is unpickled.
        return RolloutFailure(f"{type(error).__name__}: {error}")


def _replica_shuts_down() -> ReplicaShuttingDown:
    return ReplicaShuttingDown("The generator replica is being shut down.")


def _bytes_of_served_part(part: tuple[str, ServedPart]) -> int:
    return BYTES_PER_RECORD + len(part[1].body)


def _bytes_of_generation(result: Generation | RolloutFailure) -> int:
    if isinstance(result, RolloutFailure):
        return BYTES_PER_RECORD + bytes_of_text(str(result))
    tokens = len(result.token_ids)
    if isinstance(result, ScoredPrompt):
        tokens = len(result.prompt_logprobs) + len(result.top_token_ids)
    return BYTES_PER_RECORD + (BYTES_PER_TOKEN_ID + BYTES_PER_LOGPROB) * tokens + bytes_of_columns(result.columns)

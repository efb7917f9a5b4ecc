"""The engine's outputs for calls of vLLM's serving layers: one choice each, which updates of the weights do not end."""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

from vllm.exceptions import VLLMServerError
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.failures import (
    GenerationLost,
    OtherVersionLoaded,
    Overloaded,
    ReplicaShuttingDown,
    RolloutFailure,
    VersionReplaced,
)
from deployments.generation.adapters import Adapters
from deployments.generation.continued_completion import ContinuedCompletion
from deployments.generation.engine_requests import expert_column, logprob_columns, spans_of
from deployments.generation.health import refuse_not_finite
from deployments.generation.weight_updater import WeightUpdater
from deployments.protocols.generation import GenerationRequest, WeightSpan, packed_ids, packed_logprobs
from deployments.protocols.token_columns import Columns, all_rows
from deployments.protocols.weight_versions import refuse_other_version
from deployments.upstream.vllm.held_outputs import end_requests
from rollout_client.contract.base import label_of
from rollout_client.contract.messages import PackedNumbers

ABORTED_BY_ENGINE = "The engine ended the generation early."
logger = logging.getLogger("rollout_service.generation")


def log_failure(failure: RolloutFailure, request: GenerationRequest) -> None:
    """Logs a failed generation. Hundreds fail with an engine that dies, which the replica's health check reports."""
    cause = failure.__cause__
    is_expected = isinstance(failure, ReplicaShuttingDown | OtherVersionLoaded | Overloaded)
    level = logging.INFO if is_expected or isinstance(cause, EngineDeadError) else logging.WARNING
    # Without a cause the engine raised nothing, and a traceback would say nothing.
    exc_info = failure if cause is not None and level == logging.WARNING else None
    logger.log(level, "%s", failure, exc_info=exc_info, extra=request.log_fields)


@dataclass(slots=True, eq=False)
class RunningGeneration:
    """One generation between its arrival and its result."""

    request: GenerationRequest
    engine_id: str
    """Its id in the engine: unique, while a retry has the `generation_id` of the generation that it repeats."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    failure: RolloutFailure | None = None
    """Why it was interrupted; `None` if it can go on here."""

    async def wait_until_interrupted_or(self, event: asyncio.Event) -> None:
        """Returns when the event is set, or the generation is interrupted."""
        waiting = [asyncio.create_task(either.wait()) for either in (event, self.interrupted)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


class RunningGenerations:
    """The generations that run in one engine, found by their ids."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._running: set[RunningGeneration] = set()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def running(self, request: GenerationRequest) -> Iterator[RunningGeneration]:
        """The generation runs for the length of the block, and can be interrupted."""
        generation = RunningGeneration(request, f"{request.generation_id}.{next(self._numbers)}")
        self._running.add(generation)
        try:
            yield generation
        finally:
            self._running.discard(generation)

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        """Ends those of these `generation_id`s, with the tokens that they have. Unknown ids are ignored.

        Args:
            failure: as in `RunningGeneration`.
        """
        wanted = set(generation_ids)
        ended = [one for one in self._running if one.request.generation_id in wanted]
        for generation in ended:
            generation.failure = failure
            generation.interrupted.set()
        if ended:
            await end_requests(self._llm, [generation.engine_id for generation in ended])


@dataclass(slots=True)
class GeneratedChoice:
    """Tokens that the engine has generated so far for one choice of a call."""

    token_ids: "array[int]" = field(default_factory=lambda: packed_ids(()))
    logprobs: "array[float]" = field(default_factory=lambda: packed_logprobs(()))
    """One for each id, in calls of a session and in those that show ids."""
    finish_reason: str | None = None
    """Once the engine has ended it."""
    weight_versions: tuple[WeightSpan, ...] = ()
    """Likewise; before that those up to the last update of the weights that has interrupted it."""
    parts: list[Columns] = field(default_factory=list)
    """The columns of each output, in calls of a session that includes some."""
    experts: Columns = field(default_factory=dict)
    """The column of its routed experts, once the engine has ended it."""

    def add(self, completion: CompletionOutput, keeps_logprobs: bool, columns: "ColumnReader | None") -> None:
        """Adds an output. Raises as `ServedCall.note`."""
        if columns is not None:
            columns.read(self, completion)
        self.token_ids.extend(completion.token_ids)
        if completion.logprobs is not None and keeps_logprobs:
            logprobs = packed_logprobs(_sampled_logprobs(completion.logprobs, completion.token_ids))
            refuse_not_finite(logprobs)
            self.logprobs.extend(logprobs)
        if completion.finish_reason is not None:
            self.finish_reason = completion.finish_reason
        if completion.weight_versions is not None:
            self.weight_versions = spans_of(completion)

    @property
    def columns(self) -> dict[str, PackedNumbers]:
        return {**all_rows(self.parts), **self.experts}


@dataclass(frozen=True, slots=True)
class ColumnReader:
    """Reads the columns that a session includes out of the engine's outputs for one of its calls."""

    request: GenerationRequest
    """With what it includes, its `top_k` and the first token whose experts are due."""
    named: int
    """How many of the likeliest tokens the engine names for each one."""
    experts: int
    """How many experts a layer of the model has."""

    def read(self, choice: GeneratedChoice, completion: CompletionOutput) -> None:
        """Adds those of an output to a choice that does not have its tokens yet. Raises as `generation_of`."""
        if self.named and isinstance(flat := completion.logprobs, FlatLogprobs) and len(flat):
            choice.parts.append(logprob_columns(self.request, _whole_positions(flat, self.named), self.named))
        if completion.finished():
            tokens = len(choice.token_ids) + len(completion.token_ids)
            choice.experts = expert_column(self.request, completion.routed_experts, tokens, self.experts)
            # They are the session's: an agent that has not asked for megabytes is not sent them.
            completion.routed_experts = None


def _sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """Those of the sampled tokens, in either of vLLM's forms; in the flat one each position begins with them."""
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        return [logprobs.logprobs[start] for start in starts]
    return [position[token_id].logprob for position, token_id in zip(logprobs, token_ids, strict=True)]


class CompletionOutputs:
    """Streams completions of one `AsyncLLM`."""

    def __init__(self, llm: AsyncLLM, weights: WeightUpdater, adapters: Adapters, running: RunningGenerations) -> None:
        self._llm = llm
        self._weights = weights
        self._adapters = adapters
        self._running = running

    async def stream(
        self, request: GenerationRequest, prompt: Any, params: SamplingParams, index: int = 0, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the engine's outputs for one choice (`n` 1), with all versions that generated it.

        An update of the weights does not end it: it goes on with the new ones. `RunningGenerations.interrupt` ends it
        with an output whose `finish_reason` is "abort". Closing the generator aborts the request.

        Args:
            request: says which policy generates, when, and for whom.
            index: of the choice.
            options: further arguments of `AsyncLLM.generate`.

        Raises:
            GenerationLost: it was interrupted before it began, the engine broke or ended it early, or the weights
                changed while log-probabilities of the prompt were computed.
            OtherVersionLoaded: other weights than those that it demands are loaded when it begins, or goes on.
            VersionReplaced: other weights than those that it demands have generated a part of it.
            TokensTooOld: its oldest tokens are more than `max_staleness` versions behind when it begins, or goes on.
            RolloutFailure: the failure with which it was interrupted.
            Exception: anything else that vLLM raises, whose serving layers answer with it.
        """
        completion = ContinuedCompletion(prompt["prompt_token_ids"], params, self._llm.get_tokenizer(), index)
        if request.oldest_version is None:
            # What goes on after an update has tokens of these.
            request = replace(request, oldest_version=self._weights.version_of(request.policy))
        is_delta = params.output_kind == RequestOutputKind.DELTA
        goes_on = True
        while goes_on:
            goes_on = False
            with self._running.running(request) as running:
                async with aclosing(self._until_update(running, prompt, completion, options)) as outputs:
                    async for output, was_updated in outputs:
                        goes_on = was_updated and completion.interrupt(output)
                        if not goes_on or (is_delta and _says_something(output)):
                            yield output

    async def _until_update(
        self, running: RunningGeneration, prompt: Any, completion: ContinuedCompletion, options: dict[str, Any]
    ) -> AsyncGenerator[tuple[RequestOutput, bool], None]:
        """The outputs of the completion's next request, each with whether an update of the weights has ended it."""
        request, weights = running.request, self._weights
        while not weights.may_generate.is_set():
            await running.wait_until_interrupted_or(weights.may_generate)
            if running.interrupted.is_set():
                raise running.failure or GenerationLost("The generation was interrupted before it began.")
        # Nothing is awaited between this and the engine.
        refuse_other_version(request, weights.version_of(request.policy))
        adapter = self._adapters.of(request.policy)
        lora, label = (None, None) if adapter is None else (adapter.request, adapter.label)
        prompt = {**prompt, "prompt_token_ids": completion.next_prompt()}
        params, aborts, swaps = completion.next_params(), weights.aborts, weights.swaps
        begun_with, scores_prompt = str(weights.loaded.full), params.prompt_logprobs is not None
        options = options | {"lora_request": lora, "priority": request.virtual_time}
        with self._adapters.used_by_generation(adapter):
            async with aclosing(self._engine_outputs(prompt, params, running, options)) as outputs:
                async for output in outputs:
                    is_aborted = output.outputs[0].finish_reason == "abort"
                    if is_aborted and running.failure is not None:
                        raise running.failure
                    was_updated = is_aborted and not running.interrupted.is_set() and aborts != weights.aborts
                    is_asked_for = was_updated or running.interrupted.is_set() or completion.must_be_stopped
                    if is_aborted and not is_asked_for:
                        raise GenerationLost(ABORTED_BY_ENGINE)
                    if scores_prompt and output.outputs[0].token_ids and not running.interrupted.is_set():
                        # An output in the middle of a stream says no versions.
                        spans = output.outputs[0].weight_versions
                        is_changed = weights.is_paused or swaps != weights.swaps
                        if spans[0].version != begun_with if spans else is_changed:
                            raise GenerationLost("The weights changed while the prompt was scored.")
                        scores_prompt = False
                    whole = completion.add(output, label)
                    _refuse_other_spans(request, whole.outputs[0].weight_versions or ())
                    if completion.must_be_stopped:
                        await self._llm.abort([running.engine_id])
                    yield whole, was_updated

    async def _engine_outputs(
        self, prompt: Any, params: SamplingParams, running: RunningGeneration, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Raises `GenerationLost`, which is logged, if the engine breaks; else what vLLM raises."""
        try:
            async with aclosing(self._llm.generate(prompt, params, running.engine_id, **options)) as outputs:
                async for output in outputs:
                    yield output
        except VLLMServerError as error:
            lost = engine_failed(error)
            lost.__cause__ = error
            log_failure(lost, running.request)
            raise lost from error


def _says_something(output: RequestOutput) -> bool:
    [completion] = output.outputs
    return bool(completion.token_ids or completion.text)


def engine_failed(error: VLLMServerError) -> GenerationLost:
    return GenerationLost(f"The engine failed during the generation: {error or type(error).__name__}")


def _refuse_other_spans(request: GenerationRequest, spans: Iterable[WeightVersionSpan]) -> None:
    """Raises `VersionReplaced` if another version than the one that the request demands has generated a token."""
    if request.weight_version is None:
        return
    demanded = label_of(request.policy, request.weight_version)
    other = next((span.version for span in spans if span.version != demanded and span.end > span.start), None)
    if other is not None:
        raise VersionReplaced(
            f"Version {demanded} must generate every token, and version {other} took its place before the end. Demand "
            "another version, or push new weights when calls have ended."
        )


def _whole_positions(flat: FlatLogprobs, named: int) -> FlatLogprobs:
    """The log-probabilities with `named` likeliest tokens after each sampled one.

    vLLM joins outputs of a stream that nobody has read yet through dicts. There a sampled token that is one of the
    likeliest stands once, with its rank among these.
    """
    if len(flat.token_ids) == (1 + named) * len(flat):
        return flat
    whole = FlatLogprobs()
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        places = list(range(start, end))
        if len(places) <= named:
            places.insert(flat.ranks[start] or 0, start)
        ids, logprobs = [flat.token_ids[place] for place in places], [flat.logprobs[place] for place in places]
        whole.append_fast(ids, logprobs, chain(range(len(ids))), [None] * len(ids))
    return whole

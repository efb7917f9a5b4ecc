"""Tokens that the engine's core holds until there is a portion of them, for requests of which only the end is read.

vLLM's core sends the token of each request after each step with three arrays for its log-probability, and its front end
spends most of its processor time on decoding those. `stream_interval` thins only what the front end hands on.

Laws: what a request has generated at its end, whatever ends it but a failure of the engine, is what it would have
without; each output has tokens of one version of the weights. Held tokens leave the core when a portion is full, the
request ends, `end_requests` names it, or the engine pauses, as it does for each change of the weights. The first token
of a request leaves at once, for vLLM's metrics of the time to it; those of the time between tokens count portions.

A request of which a token is held and that only goes on takes a short way through the scheduler.

Needed with vLLM 0.32; no upstream issue is known.
"""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreEvent, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

logger = logging.getLogger("rollout_service.generation")
PORTION = 32
"""Tokens of a request that leave the core together."""
PORTION_WITH_STOPS = 4
"""Those of a request with stop strings, for which the front end looks: what follows one was computed in vain."""
_ANSWER_S = 4.0
"""An engine answers between two steps. One that does not for so long hangs, or computes what nobody waits for."""
_MOST_SHARED_COLUMNS = 2
"""Log-probabilities of more columns are copied: held rows of a few requests would keep those of all in memory."""


class _StepLogprobs:
    """vLLM's log-probabilities of one step, of which it cuts no arrays for each request."""

    def __init__(self, lists: LogprobsLists) -> None:
        self._lists = lists

    def slice_request(self, index: int, tokens: int) -> Any:
        """The rows of a request: arrays, the first row in them and the one after the last."""
        lists, starts = self._lists, self._lists.cu_num_generated_tokens
        first = index if starts is None else starts[index]
        if lists.logprobs.shape[1] <= _MOST_SHARED_COLUMNS:
            return lists, first, first + tokens
        ids, logprobs, ranks = (rows[first : first + tokens].copy() for rows in lists[:3])
        return LogprobsLists(ids, logprobs, ranks), 0, tokens


@dataclass(slots=True)
class _Held:
    """Tokens that a request has made since its last portion left, and what belongs to them, by step."""

    token_ids: list[int] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    """Log-probabilities, as `_StepLogprobs` has them."""
    routed_experts: list[np.ndarray] = field(default_factory=list)
    events: list[EngineCoreEvent] = field(default_factory=list)
    more: int = 0
    """How many tokens may follow that only go on: then it ends, a portion is full, or vLLM is to look at each."""
    ends: frozenset[int | None] = frozenset()
    """The tokens that end it."""

    def add(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        self.events += output.events or ()
        if output.new_logprobs is not None:
            self.rows.append(output.new_logprobs)
        if output.routed_experts is not None:
            self.routed_experts.append(output.routed_experts.copy())  # It may be a view of those of the whole step.

    def leave(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """The output, with all that is held."""
        output.new_token_ids, output.events = self.token_ids, self.events or None
        output.new_logprobs = _joined_rows(self.rows) if self.rows else None
        output.routed_experts = np.concatenate(self.routed_experts) if self.routed_experts else None
        return output


class _HoldsOutputs(Scheduler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _let_core_release()
        _fill_blocks_without_search(self.kv_cache_manager)
        self._held: defaultdict[str, _Held] = defaultdict(_Held)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if model_runner_output.logprobs is not None:
            model_runner_output.logprobs = _StepLogprobs(model_runner_output.logprobs)  # type: ignore[assignment]
        if self._makes_tokens_alone(scheduler_output, model_runner_output):
            others = self._hold_next_tokens(scheduler_output.num_scheduled_tokens, model_runner_output)
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=others)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if self._leaves(output)]
        return outputs

    def _makes_tokens_alone(self, step: SchedulerOutput, made: ModelRunnerOutput) -> bool:
        """Whether a step has made a token for each request, with log-probabilities, and nothing else."""
        return bool(made.sampled_token_ids) and not (
            step.scheduled_spec_decode_tokens
            or made.pooler_output
            or made.prompt_logprobs_dict
            or made.prompt_token_id_logprobs_dict
            or made.kv_connector_output
            or made.num_nans_in_logits
            or self.aux_output_connector
            or self.return_sampling_mask
            or (self.perf_metrics and self.perf_metrics.is_enabled())
        )

    def _hold_next_tokens(self, scheduled: dict[str, int], made: ModelRunnerOutput) -> dict[str, int]:
        """Holds the tokens of requests that only go on; returns the other requests."""
        others: dict[str, int] = {}
        for request_id, tokens in scheduled.items():
            held, request = self._held.get(request_id), self.requests.get(request_id)
            row = made.req_id_to_index[request_id]
            sampled = made.sampled_token_ids[row]
            if held is None or request is None or not _goes_on(request, held, sampled):
                others[request_id] = tokens
                continue
            request.num_in_flight_tokens -= tokens
            self._update_request_with_output(request, sampled)
            held.more -= 1
            held.token_ids += sampled
            if held.rows and made.logprobs is not None:
                held.rows.append(made.logprobs.slice_request(row, 1))
        return others

    def _leaves(self, output: EngineCoreOutput) -> bool:
        """Whether an output leaves, which then has what is held; it is held itself otherwise."""
        request, held = self.requests.get(output.request_id), self._held[output.request_id]
        held.add(output)
        if request is not None and request.sampling_params is not None and _has_tokens_alone(output):
            params, missing = request.sampling_params, _portion_of(request) - len(held.token_ids)
            if missing > 0:
                to_end = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens)
                is_plain = not (request.structured_output_request or request.mm_features or params.repetition_detection)
                held.more = min(missing, to_end) - 1 if is_plain else 0
                held.ends = frozenset((params.eos_token_id, *(params.stop_token_ids or ())))
                return False
        self._held.pop(output.request_id).leave(output)
        return True

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._held.pop(request.request_id, None)
        return ended

    def released(self, request_ids: Iterable[str] | None = None) -> dict[int, list[EngineCoreOutput]]:
        """The outputs held for these requests, or for all, by client. They are held no longer."""
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for request_id in list(self._held) if request_ids is None else request_ids:
            if held := self._held.pop(request_id, None):
                request = self.requests[request_id]
                output = EngineCoreOutput(request_id, [], num_nans_in_logits=request.num_nans_in_logits)
                by_client.setdefault(request.client_index, []).append(held.leave(output))
        return by_client


class _HoldingScheduler(_HoldsOutputs):
    """vLLM's synchronous scheduler, holding outputs."""


class _HoldingAsyncScheduler(_HoldsOutputs, AsyncScheduler):
    """vLLM's asynchronous scheduler, holding outputs."""


def _portion_of(request: Request) -> int:
    params = request.sampling_params
    if params is None or params.output_kind != RequestOutputKind.FINAL_ONLY or request.resumable:
        return 1
    return PORTION_WITH_STOPS if params.stop else PORTION


def _goes_on(request: Request, held: _Held, sampled: list[int]) -> bool:
    """Whether one token follows that ends neither the request nor a portion, and nothing else is to be told."""
    return (
        held.more > 0
        and len(sampled) == 1
        and sampled[0] not in held.ends
        and request.status == RequestStatus.RUNNING
        and not (request.num_stale_output_tokens or request.events)
    )


def _has_tokens_alone(output: EngineCoreOutput) -> bool:
    """Whether the output has what is joined to that of other steps, and nothing beside it."""
    return (
        output.finish_reason is None
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and output.new_sampling_mask is None
    )


def _joined_rows(rows: list[Any]) -> LogprobsLists:
    """As many columns as the narrowest step has: those are there for other requests of a step that has more."""
    width = min(lists.logprobs.shape[1] for lists, _, _ in rows)
    return LogprobsLists(
        np.concatenate([lists.logprob_token_ids[first:end, :width] for lists, first, end in rows]),
        np.concatenate([lists.logprobs[first:end, :width] for lists, first, end in rows]),
        np.concatenate([lists.sampled_token_ranks[first:end] for lists, first, end in rows]),
    )


def _fill_blocks_without_search(manager: KVCacheManager) -> None:
    """Gives the next token of a request the place after its last one, which is its own within a block of the cache.

    vLLM looks at each token for blocks to free, allocate and remember, for half of its scheduler's time.
    The first and last place of a block are left to it, and all caches but those of full attention.
    """
    managers = manager.coordinator.single_type_managers
    if any(type(of_group) is not FullAttentionManager for of_group in managers):
        return
    sizes, allocate_slots = {of_group.block_size for of_group in managers}, manager.allocate_slots

    @functools.wraps(allocate_slots)
    def fill_or_allocate(request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0, **options: Any) -> Any:
        if num_new_tokens == 1 and not num_lookahead_tokens and not options:
            place = request.num_computed_tokens
            if all(0 < place % size < size - 1 for size in sizes):
                return manager.empty_kv_cache_blocks
        return allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **options)

    patched: Any = manager
    patched.allocate_slots = fill_or_allocate


def _let_core_release() -> None:
    """Patches vLLM's `EngineCoreProc`. May be called more than once."""
    core: Any = EngineCoreProc
    if hasattr(core, "end_requests"):
        return
    pause_scheduler, finish_pause = core.pause_scheduler, core._finish_pause

    @functools.wraps(pause_scheduler)
    def release_and_pause(self: Any, mode: Any = "abort", clear_cache: bool = True) -> Any:
        if mode == "abort":
            _release(self)
        return pause_scheduler(self, mode, clear_cache)

    @functools.wraps(finish_pause)
    def release_and_finish(self: Any, clear_cache: bool) -> None:
        _release(self)
        finish_pause(self, clear_cache)

    core.pause_scheduler, core._finish_pause = release_and_pause, release_and_finish
    core.end_requests = _end_requests


def _release(core: Any, request_ids: list[str] | None = None) -> None:
    """Sends what is held for these requests, or for all, labelled with the weights that are still loaded."""
    for client, outputs in core.scheduler.released(request_ids).items():
        released = EngineCoreOutputs(outputs=outputs, weight_version=core._weight_version)
        core.output_queue.put_nowait((client, released))


def _end_requests(core: Any, request_ids: list[str]) -> list[str]:
    """Aborts requests; their last outputs have all tokens that they have generated.

    Returns those that have generated none. They have no last output, by which vLLM's metrics would count a first token.
    """
    _release(core, request_ids)
    ended = core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
    core._send_abort_outputs([request for request in ended if request.num_output_tokens])
    return [request.request_id for request in ended if not request.num_output_tokens]


def hold_outputs(config: VllmConfig) -> None:
    """Lets an engine of this configuration hold outputs. May be called more than once."""
    scheduler = _HoldingAsyncScheduler if config.scheduler_config.async_scheduling else _HoldingScheduler
    config.scheduler_config.scheduler_cls = f"{__name__}.{scheduler.__name__}"


class PortionLogprobs(LogprobsProcessor):
    """vLLM's, which takes all tokens of a portion at once where no texts are wanted."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        flat = self.logprobs
        if not isinstance(flat, FlatLogprobs) or self.tokenizer is not None or (self.num_logprobs or 0) < 0:
            super()._update_sample_logprobs(logprobs_lists)
            return
        logprobs = logprobs_lists.logprobs[:, : 1 + (self.num_logprobs or 0)]
        there, (positions, width) = len(flat.logprobs), logprobs.shape
        flat.start_indices.extend(range(there, there + positions * width, width))
        flat.end_indices.extend(range(there + width, there + (positions + 1) * width, width))
        flat.token_ids.extend(logprobs_lists.logprob_token_ids[:, :width].ravel().tolist())
        flat.logprobs.extend(logprobs.ravel().tolist())
        ranks = logprobs_lists.sampled_token_ranks.tolist()
        flat.ranks.extend(chain.from_iterable((rank, *range(1, width)) for rank in ranks))
        flat.decoded_tokens.extend(repeat(None, positions * width))
        for logprob in logprobs[:, 0].tolist():
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprob


async def end_requests(llm: Any, request_ids: Iterable[str]) -> None:
    """Ends requests of an `AsyncLLM` as its `abort` does, with all tokens that its core has generated.

    From a core that is dead, refuses or does not answer, with those that have left it.
    """
    named, names = llm.output_processor.external_req_ids, list(request_ids)
    ids = [one for name in names for one in named.get(name, ())]
    try:
        async with asyncio.timeout(_ANSWER_S):
            without_tokens = await llm.engine_core.call_utility_async("end_requests", ids) if ids else []
    except Exception as error:  # noqa: BLE001 - vLLM raises a bare one for what its core refuses
        logger.warning("The engine's core did not end its requests, which may lose their last tokens: %r", error)
        await llm.abort(names)
    else:
        await llm.abort(without_tokens, internal=True)

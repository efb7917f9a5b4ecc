"""Tokens that the engine's core holds until there is a portion of them, for requests of which only the end is read.

vLLM's core sends the token of each request after each step with three arrays for its log-probability, and its front end
spends most of its processor time on decoding those. `stream_interval` thins only what the front end hands on.

Laws: what a request has generated at its end, whatever ends it but a failure of the engine, is what it would have
without; each output has tokens of one version of the weights. Held tokens leave the core when a portion is full, the
request ends, `end_requests` names it, or the engine pauses, as it does for each change of the weights. The first token
of a request leaves at once, for vLLM's metrics of the time to it; those of the time between tokens count portions.

Needed with vLLM 0.32; no upstream issue is known.
"""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
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


class _HoldsOutputs(Scheduler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _let_core_release()
        self._held: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        """By request, what has left none of its tokens yet; their `new_logprobs` are those of `_StepLogprobs`."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if model_runner_output.logprobs is not None:
            model_runner_output.logprobs = _StepLogprobs(model_runner_output.logprobs)  # type: ignore[assignment]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            of_client.outputs = [ready for output in of_client.outputs if (ready := self._ready(output)) is not None]
        return outputs

    def _ready(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """The output with those that were held before it; `None` if it is held too."""
        request, held = self.requests.get(output.request_id), self._held[output.request_id]
        held.append(output)
        if request is not None and _has_tokens_alone(output) and len(held) < _portion_of(request):
            if output.routed_experts is not None:
                output.routed_experts = output.routed_experts.copy()  # It may be a view of those of the whole step.
            return None
        return _joined(self._held.pop(output.request_id))

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._held.pop(request.request_id, None)
        return ended

    def released(self, request_ids: Iterable[str] | None = None) -> dict[int, list[EngineCoreOutput]]:
        """The outputs held for these requests, or for all, by client. They are held no longer."""
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for request_id in list(self._held) if request_ids is None else request_ids:
            if held := self._held.pop(request_id, []):
                by_client.setdefault(self.requests[request_id].client_index, []).append(_joined(held))
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


def _has_tokens_alone(output: EngineCoreOutput) -> bool:
    """Whether the output has what is joined to that of other steps, and nothing beside it."""
    return (
        output.finish_reason is None
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and output.new_sampling_mask is None
    )


def _joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The outputs of a request as one."""
    last = outputs[-1]
    rows = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    last.new_logprobs = _joined_rows(rows) if rows else None
    if len(outputs) > 1:
        last.new_token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
        last.events = [event for output in outputs for event in output.events or ()] or None
        experts = [output.routed_experts for output in outputs if output.routed_experts is not None]
        last.routed_experts = np.concatenate(experts) if experts else None
    return last


def _joined_rows(rows: list[Any]) -> LogprobsLists:
    """As many columns as the narrowest step has: those are there for other requests of a step that has more."""
    width = min(lists.logprobs.shape[1] for lists, _, _ in rows)
    return LogprobsLists(
        np.concatenate([lists.logprob_token_ids[first:end, :width] for lists, first, end in rows]),
        np.concatenate([lists.logprobs[first:end, :width] for lists, first, end in rows]),
        np.concatenate([lists.sampled_token_ranks[first:end] for lists, first, end in rows]),
    )


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

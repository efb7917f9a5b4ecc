"""Requests to vLLM and its outputs: from our requests to its parameters, and from its outputs to our results."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.failures import GenerationLost, GenerationRejected
from deployments.generation.health import refuse_not_finite
from deployments.protocols.generation import (
    TIED_TOKENS,
    Generation,
    GenerationRequest,
    ScoredPrompt,
    ScoringRequest,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from deployments.protocols.token_columns import EXPERTS, MASK, MASK_SIZES, numbers_of
from rollout_client.contract.messages import NumberType, PackedNumbers

_MISSING_PROBABILITY = 1e-3
"""Rounding of the log-probabilities of a thousand tokens takes less."""
_MOST_OF_A_BYTE = 256


def sampling_params(request: GenerationRequest) -> SamplingParams:
    options = request.sampling
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        max_tokens=request.max_new_tokens,
        stop=list(request.stop_strings),
        include_stop_str_in_output=True,
        # vLLM finds stop strings in the text. Without them the ingress detokenizes, once per message.
        detokenize=bool(request.stop_strings),
        logprobs=likeliest_tokens(request),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        routed_experts_prompt_start=request.experts_from,
    )


def likeliest_tokens(request: GenerationRequest) -> int:
    """How many of the likeliest tokens vLLM has to name for each one: those that `logprob_columns` looks at."""
    include = request.include
    of_mask = request.sampling.top_k + TIED_TOKENS if include.sampling_mask or include.entropy else 0
    return max(include.top_logprobs, of_mask)


def generation_of(
    completion: CompletionOutput, adapter: str | None, request: GenerationRequest | None = None, experts: int = 0
) -> Generation:
    """The generation as the loop takes it; with an adapter, all its tokens are labelled with the adapter's label.

    vLLM's own spans name only full weights.

    Args:
        request: what was asked for; by default nothing beside the log-probabilities.
        experts: how many experts a layer of the model has.

    Raises:
        GenerationLost: the engine failed in the middle of it, or its log-probabilities are incomplete.
        GenerationNotFinite: one of its log-probabilities is NaN or infinite.
        GenerationRejected: more tokens could be sampled than the engine names.
    """
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise GenerationLost(f"The engine ended the generation early ({completion.finish_reason}).")
    token_ids = packed_ids(completion.token_ids)
    flat = completion.logprobs if isinstance(completion.logprobs, FlatLogprobs) else FlatLogprobs()
    each = 1 + (likeliest_tokens(request) if request else 0)
    logprobs = packed_logprobs(flat.logprobs[::each])
    if len(flat.logprobs) != each * len(token_ids):
        raise GenerationLost(f"The engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens.")
    refuse_not_finite(logprobs)
    rows, tokens = completion.routed_experts, len(completion.token_ids)
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=completion.finish_reason,  # type: ignore[arg-type]
        weight_versions=spans_of(completion) if adapter is None else (WeightSpan(adapter, 0, len(token_ids)),),
        columns={}
        if request is None
        else logprob_columns(request, flat) | expert_column(request, rows, tokens, experts),
    )


def spans_of(completion: CompletionOutput) -> tuple[WeightSpan, ...]:
    return tuple(WeightSpan(span.version, span.start, span.end) for span in completion.weight_versions or ())


def logprob_columns(
    request: GenerationRequest, flat: FlatLogprobs, named: int | None = None
) -> dict[str, PackedNumbers]:
    """The columns that are made of the likeliest tokens, with their log-probabilities after top-k, top-p and min-p.

    Args:
        named: how many of them the engine has named for each token; by default `likeliest_tokens`, the fewest.

    Raises:
        GenerationRejected: more tokens could be sampled than the engine names.
    """
    include, fewest = request.include, likeliest_tokens(request)
    if not fewest:
        return {}
    each = 1 + (fewest if named is None else named)
    ids = np.array(flat.token_ids, np.int32).reshape(-1, each)[:, 1:]
    logprobs = np.array(flat.logprobs, np.float32).reshape(-1, each)[:, 1:]
    columns: dict[str, PackedNumbers] = {}
    if include.top_logprobs:
        row = [include.top_logprobs]
        columns["top_token_ids"] = numbers_of(ids[:, : row[0]].tobytes(), "int32", row)
        columns["top_logprobs"] = numbers_of(logprobs[:, : row[0]].tobytes(), "float32", row)
    if not (include.sampling_mask or include.entropy):
        return columns
    could_be_sampled = np.isfinite(logprobs)
    probabilities = np.exp(logprobs.astype(np.float64))
    missing = 1 - probabilities.sum(1).min(initial=1)
    if missing > _MISSING_PROBABILITY:
        raise GenerationRejected(
            f"Beside the {each - 1} likeliest tokens others could be sampled, with a probability of {missing:.2g} "
            f"together: more than {TIED_TOKENS} tokens share the last place of top_k {request.sampling.top_k}. Ask for "
            "a lower top_k, or leave sampling_mask and entropy out of include."
        )
    if include.sampling_mask:
        columns[MASK] = numbers_of(ids[could_be_sampled].tobytes(), "int32")
        columns[MASK_SIZES] = numbers_of(could_be_sampled.sum(1).astype("<u2").tobytes(), "uint16")
    if include.entropy:
        entropy = 0 - (probabilities * np.where(could_be_sampled, logprobs, 0)).sum(1)
        columns["entropy"] = numbers_of(entropy.astype(np.float32).tobytes(), "float32")
    return columns


def expert_column(
    request: GenerationRequest, rows: NDArray[Any] | None, tokens: int, experts: int
) -> dict[str, PackedNumbers]:
    """The column of the rows that the engine has returned with the last of so many generated tokens.

    Raises `GenerationLost` if it has not returned the experts of each token.
    """
    if not request.include.routed_experts:
        return {}
    # The last token was sampled, and not computed.
    due = len(request.prompt_token_ids) - request.experts_from + max(tokens - 1, 0)
    if rows is None and not (due and tokens):
        # The log had those of all tokens before the only one, or the generation was interrupted before its first.
        return {}
    if rows is None or (tokens and len(rows) != due):
        found = "none" if rows is None else len(rows)
        raise GenerationLost(f"The engine gave the experts of {found} of {due} tokens.")
    dtype: NumberType = "uint8" if experts <= _MOST_OF_A_BYTE else "uint16"
    return {EXPERTS: numbers_of(rows.astype(dtype).tobytes(), dtype, rows.shape[1:])}


def scoring_params(request: ScoringRequest, has_last_token_apart: bool) -> SamplingParams:
    """At temperature 1, without top-p and top-k: what vLLM's log-probabilities of prompts always are.

    vLLM computes the whole prompt anew, because its prefix cache holds no log-probabilities, and generates one token,
    which is dropped.

    Args:
        has_last_token_apart: the prompt ends before the last token, whose log-probability is taken from the place of
            the generated token. vLLM refuses a prompt of `max_model_len` tokens.
    """
    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        detokenize=False,
        prompt_logprobs=request.top_k,
        logprob_token_ids=[request.prompt_token_ids[-1]] if has_last_token_apart else None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scored_prompt_of(
    request: ScoringRequest, output: RequestOutput, adapter: str | None, has_last_token_apart: bool
) -> ScoredPrompt:
    """The scores in an output. `adapter` is the label of the one used; `has_last_token_apart` as in `scoring_params`.

    Raises:
        GenerationLost: the engine failed in the middle of it, or its log-probabilities are incomplete.
        GenerationNotFinite: one of its log-probabilities is NaN or infinite.
    """
    completion, prompt = output.outputs[0], output.prompt_logprobs
    spans = completion.weight_versions
    if completion.finish_reason not in ("stop", "length") or not isinstance(prompt, FlatLogprobs) or not spans:
        raise GenerationLost(f"The engine ended the scoring early ({completion.finish_reason}).")
    each, first = 1 + request.top_k, max(request.start, 1)
    positions = len(request.prompt_token_ids) - first
    ids, logprobs = prompt.token_ids[(first - 1) * each :], prompt.logprobs[(first - 1) * each :]
    if has_last_token_apart and isinstance(completion.logprobs, FlatLogprobs):
        # The generated token comes first.
        ids, logprobs = ids + completion.logprobs.token_ids[1:], logprobs + completion.logprobs.logprobs[1:]
    if len(logprobs) != positions * each:
        raise GenerationLost(f"The engine gave {len(logprobs)} log-probabilities for {positions} tokens.")
    refuse_not_finite(packed_logprobs(logprobs))
    top = [place for place in range(len(logprobs)) if place % each]
    return ScoredPrompt(
        packed_ids(()),
        packed_logprobs(()),
        "length",
        prompt_logprobs=packed_logprobs(logprobs[::each]),
        top_token_ids=packed_ids(ids[place] for place in top),
        top_logprobs=packed_logprobs(logprobs[place] for place in top),
        weight_version=spans[-1].version if adapter is None else adapter,
    )

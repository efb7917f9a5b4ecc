"""Requests to vLLM and its outputs: from our requests to its parameters, and from its outputs to our results."""

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.failures import GenerationLost
from deployments.generation.output_health import refuse_not_finite
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)

WARM_UP_TOKENS = 8


def warm_up_requests() -> list[GenerationRequest]:
    """With and without stop strings, because vLLM detokenizes only with them."""
    return [
        GenerationRequest(f"warm-up-{number}", [0], WARM_UP_TOKENS, stop_strings, SamplingOptions())
        for number, stop_strings in enumerate(((), ("never",)))
    ]


def health_request() -> GenerationRequest:
    """A token that shows that the engine works."""
    return GenerationRequest("health-check", [0], 1, (), SamplingOptions())


def health_params(request: GenerationRequest) -> SamplingParams:
    """Does not look into the prefix cache, whose counters tell how often rollouts find their prefixes."""
    params = sampling_params(request)
    params.skip_reading_prefix_cache = True
    return params


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
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def generation_of(completion: CompletionOutput, adapter: str | None) -> Generation:
    """The generation as the loop takes it; with an adapter, all its tokens are labelled with the adapter's label.

    vLLM's own spans name only full weights.

    Raises:
        GenerationLost: the engine failed in the middle of it, or its log-probabilities are incomplete.
        GenerationNotFinite: one of its log-probabilities is NaN or infinite.
    """
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise GenerationLost(f"The engine ended the generation early ({completion.finish_reason}).")
    token_ids = packed_ids(completion.token_ids)
    logprobs = packed_logprobs(completion.logprobs.logprobs if isinstance(completion.logprobs, FlatLogprobs) else ())
    if len(logprobs) != len(token_ids):
        raise GenerationLost(f"The engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens.")
    refuse_not_finite(logprobs)
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=completion.finish_reason,  # type: ignore[arg-type]
        weight_versions=tuple(
            WeightSpan(span.version, span.start, span.end) for span in completion.weight_versions or ()
        )
        if adapter is None
        else (WeightSpan(adapter, 0, len(token_ids)),),
    )


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

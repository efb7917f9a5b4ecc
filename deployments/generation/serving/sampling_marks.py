"""Marks of how a call of a session sampled: the two fields of its messages that a loss looks at. No I/O."""

from vllm.sampling_params import SamplingParams

from deployments.upstream.vllm.token_texts import TEXTS_ARE_UNSEEN
from rollout_client.contract.messages import SampledWith
from rollout_client.contract.rollouts import Sampling

NO_SAMPLING = frozenset({TEXTS_ARE_UNSEEN, "kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})
"""Further arguments that move no token. Any other is one of a plugin of the engine, which may."""


def is_constrained(params: SamplingParams) -> bool:
    """Whether something that the call asked for makes tokens more or less likely whatever the policy says.

    Temperature, top-p, top-k and min-p are the policy's own distribution. Stop texts, stop ids, `ignore_eos` and the
    detection of repetition say where a response ends, and not what is sampled.
    """
    wanted = params.structured_outputs
    return (
        (wanted is not None and not wanted.all_constraints_none())
        # Asked for, also if it moves nothing.
        or params.logit_bias is not None
        or params.allowed_token_ids is not None
        or bool(params.bad_words)
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or params.min_tokens > 0
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids is not None
        or bool(params.watermarking)
        or not (params.extra_args or {}).keys() <= NO_SAMPLING
    )


def sampled_with(params: SamplingParams, session: Sampling | None) -> SampledWith | None:
    """The distribution that the call samples from, if it is not the one that its session says."""
    asked = session or Sampling()
    of_call = distribution(params.temperature, params.top_p, params.top_k, params.min_p)
    temperature = 0.0 if asked.greedy else asked.temperature
    return None if of_call == distribution(temperature, asked.top_p, asked.top_k, asked.min_p) else of_call


def distribution(temperature: float, top_p: float, top_k: int, min_p: float) -> SampledWith:
    """Greedy decoding is the same whatever the others are."""
    if not temperature:
        return SampledWith(temperature=0.0)
    return SampledWith(temperature=temperature, top_p=top_p, top_k=max(top_k, 0), min_p=min_p)

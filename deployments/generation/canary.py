"""The canary: fixed prompts that an engine plays with new weights before anybody else does."""

from array import array

from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.failures import GenerationLost
from deployments.generation.engine_requests import generation_of
from deployments.generation.finite_logprobs import refuse_not_finite
from deployments.protocols import packed_ids, packed_logprobs

CANARY_PROMPTS = 4
CANARY_PROMPT_TOKENS = 16
CANARY_TOKENS = 4
"""Generated for each prompt."""
STEP = 7919
"""A prime: the ids of the prompts are spread over any vocabulary."""


def canary_prompts(vocab_size: int, max_model_len: int) -> "list[array[int]]":
    """Prompts of `CANARY_PROMPT_TOKENS` tokens, shorter for a model that does not take so many; always the same."""
    length = max(min(CANARY_PROMPT_TOKENS, max_model_len - CANARY_TOKENS), 1)
    return [
        packed_ids((prompt * CANARY_PROMPT_TOKENS + place + 1) * STEP % vocab_size for place in range(length))
        for prompt in range(CANARY_PROMPTS)
    ]


def canary_params() -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        ignore_eos=True,
        max_tokens=CANARY_TOKENS,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def refuse_bad_canary(output: RequestOutput) -> None:
    """
    Raises:
        GenerationNotFinite: a log-probability of the prompt or of the generated tokens is NaN or infinite.
        GenerationLost: the generation was not finished.
    """
    if generation_of(output.outputs[0], None).finish_reason == "abort":
        raise GenerationLost("The engine ended the canary early.")
    prompt = output.prompt_logprobs
    refuse_not_finite(packed_logprobs(prompt.logprobs if isinstance(prompt, FlatLogprobs) else ()))

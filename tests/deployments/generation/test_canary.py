"""What the canary generates, and what fails it."""

import math

import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from deployments.failures import GenerationLost, GenerationNotFinite
from deployments.generation.canary import CANARY_PROMPT_TOKENS, CANARY_TOKENS, canary_prompts, refuse_bad_canary

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def flat(*logprobs: float) -> FlatLogprobs:
    values = FlatLogprobs()
    values.logprobs = list(logprobs)
    return values


def output(generated: list[float], prompt: list[float], finish_reason: str = "length") -> RequestOutput:
    ids = list(range(len(generated)))
    completion = CompletionOutput(0, "", ids, None, flat(*generated), finish_reason=finish_reason)
    return RequestOutput("canary", None, [1], flat(*prompt), [completion], finished=True)


@pytest.mark.parametrize(
    ("vocab_size", "max_model_len", "length"), [(262, 4096, CANARY_PROMPT_TOKENS), (5, 10, 6), (9, 2, 1)]
)
def test_the_prompts_are_tokens_of_the_model_and_leave_room_for_the_canary(
    vocab_size: int, max_model_len: int, length: int
) -> None:
    prompts = canary_prompts(vocab_size, max_model_len)
    assert [len(prompt) for prompt in prompts] == [length] * 4
    assert all(0 <= token_id < vocab_size for prompt in prompts for token_id in prompt)
    assert prompts == canary_prompts(vocab_size, max_model_len)
    assert length == 1 or length + CANARY_TOKENS <= max_model_len


def test_finite_log_probabilities_pass() -> None:
    refuse_bad_canary(output([-1.0, -2.0], [-3.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["generated", "prompt"])
def test_one_that_is_not_finite_fails_the_canary(where: str, value: float) -> None:
    bad = [-1.0, value]
    with pytest.raises(GenerationNotFinite):
        refuse_bad_canary(output(bad, [-3.0]) if where == "generated" else output([-1.0], bad))


def test_a_canary_that_the_engine_ends_early_has_failed() -> None:
    with pytest.raises(GenerationLost):
        refuse_bad_canary(output([-1.0], [-3.0], finish_reason="abort"))

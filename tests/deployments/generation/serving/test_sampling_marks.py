"""What makes tokens likelier than the policy does, and which distribution a call samples from."""

from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

from deployments.generation.serving.recording_client import is_constrained, sampled_with
from deployments.upstream.vllm.token_texts import skip_logprob_texts
from rollout_client.contract.messages import SampledWith
from rollout_client.contract.rollouts import Sampling

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
BINDING: dict[str, list[Any]] = {
    "structured_outputs": [StructuredOutputsParams(json={}), StructuredOutputsParams(choice=["a"])],
    "logit_bias": [{5: 1.0}, {5: 0.0}, {}],
    "allowed_token_ids": [[5]],
    "bad_words": [["no"]],
    "presence_penalty": [0.5, -0.5],
    "frequency_penalty": [0.5, -0.5],
    "repetition_penalty": [1.1, 0.9],
    "min_tokens": [1],
    "thinking_token_budget": [0, 8],
    "trace_decode_token_ids": [[5]],
    "watermarking": [True],
    "extra_args": [{"ngram_size": 3}],
}
ON = ("ignore_eos", "flat_logprobs", "include_stop_str_in_output", "skip_clone", "skip_reading_prefix_cache")
FREE: dict[str, list[Any]] = {
    **{key: [True] for key in ON},
    **{key: [False] for key in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens")},
    **{key: [2] for key in ("n", "seed", "max_tokens", "logprobs", "prompt_logprobs", "stream_interval")},
    **{key: [0] for key in ("prompt_logprob_start", "routed_experts_prompt_start")},
    **{key: [[5]] for key in ("stop_token_ids", "prompt_logprob_token_ids", "logprob_token_ids")},
    **{key: [] for key in ("output_kind", "output_text_buffer_length")},
    "stop": [["."]],
    "repetition_detection": [RepetitionDetectionParams(max_pattern_size=3, min_count=3)],
}
OF_THE_POLICY: dict[str, list[Any]] = {"temperature": [0.0, 0.5, 2.0], "top_p": [0.5], "top_k": [4], "min_p": [0.1]}


def test_every_parameter_of_vllm_is_known_to_bind_or_not() -> None:
    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public == BINDING.keys() | FREE.keys() | OF_THE_POLICY.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BINDING for value in BINDING[name]])
def test_what_moves_tokens_whatever_the_policy_says_constrains(name: str, value: Any) -> None:
    assert is_constrained(SamplingParams(**{name: value}))


@pytest.mark.parametrize("known", [FREE, OF_THE_POLICY], ids=["free", "of the policy"])
def test_what_leaves_the_policys_distribution_does_not(known: dict[str, list[Any]]) -> None:
    for name, values in known.items():
        for value in values:
            assert not is_constrained(SamplingParams(**{name: value})), name


def test_arguments_of_the_service_and_of_caches_are_none_of_a_plugin() -> None:
    params = SamplingParams(extra_args={"kv_transfer_params": {}})
    skip_logprob_texts(params)
    assert not is_constrained(params)


@pytest.mark.parametrize(
    ("call", "session", "told"),
    [
        ({}, None, None),
        ({"temperature": 0.5}, Sampling(temperature=0.5), None),
        ({"temperature": 0.5}, None, SampledWith(temperature=0.5)),
        ({"temperature": 0.0}, None, SampledWith(temperature=0.0)),
        ({"temperature": 0.0, "top_p": 0.5}, None, SampledWith(temperature=0.0)),
        ({"temperature": 0.0, "top_p": 0.5}, Sampling(greedy=True), None),
        ({"temperature": 0.0}, Sampling(temperature=0.0, top_k=5), None),
        ({"temperature": 0.7}, Sampling(greedy=True, temperature=0.7), SampledWith(temperature=0.7)),
        ({"top_k": -1}, Sampling(top_k=0), None),
        ({"top_k": 0}, Sampling(top_k=-1), None),
        ({"top_k": 4}, Sampling(top_p=0.9), SampledWith(temperature=1.0, top_k=4)),
        ({"top_p": 0.9, "min_p": 0.1}, None, SampledWith(temperature=1.0, top_p=0.9, min_p=0.1)),
        ({"temperature": 0.001}, Sampling(temperature=0.01), None),
    ],
)
def test_a_distribution_is_told_where_it_is_not_that_of_the_session(
    call: dict[str, Any], session: Sampling | None, told: SampledWith | None
) -> None:
    assert sampled_with(SamplingParams(**call), session) == told

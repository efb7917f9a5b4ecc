"""What a session writes into the requests of its calls."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from deployments.generation.serving.answered_layers import _prepare_chat
from deployments.generation.serving.served_call import ServedCall
from deployments.protocols.generation import SamplingOptions, derived_seed
from deployments.protocols.model_server import ServedRequest
from rollout_client.contract.rollouts import Sampling

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def prepared(generation_index: int = 0, sampling: Sampling | None = None, **asked: object) -> ChatCompletionRequest:
    request = ChatCompletionRequest.model_validate({"messages": [], "model": "gpt-4o", **asked})
    sent = ServedRequest(
        "one", (), 1, (), SamplingOptions(), session_sampling=sampling, generation_index=generation_index
    )
    _prepare_chat(request, ServedCall(sent))
    return request


def test_a_field_that_a_call_leaves_out_is_the_sessions() -> None:
    request = prepared(sampling=Sampling(temperature=0.3, seed=5, max_new_tokens=9), top_p=0.5)
    assert (request.temperature, request.top_p, request.seed, request.max_completion_tokens) == (0.3, 0.5, 5, 9)


def test_equal_seeds_of_a_groups_sessions_sample_differently() -> None:
    assert [prepared(index, seed=5).seed for index in range(3)] == [5, derived_seed(5, 1), derived_seed(5, 2)]

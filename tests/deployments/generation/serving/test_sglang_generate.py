"""SGLang's `/generate` over vLLM's own layers: what is asked of the engine, and how its outputs are answered."""

from typing import Any

import pytest

from tests.deployments.generation.serving.vllm_layers import Served
from tests.virtual_time import runs

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
FIRST, SECOND = [50, 51, 52], [60, 61]


async def answered(served: Served, body: dict[str, Any], session: str | None = None) -> Any:
    status, answer = await served.answer("generate", body, session)
    assert status == 200, answer
    return answer


@runs
async def test_a_prompt_of_ids_is_answered_with_sampled_ids_and_their_log_probabilities() -> None:
    served = Served()
    ids = served.reply("42")
    answer = await answered(served, {"input_ids": FIRST, "return_logprob": True, "rid": "a"})
    assert answer == {
        "text": "42",
        "output_ids": ids,
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": 3,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": 3}],
            "completion_tokens": 3,
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.25, token_id, None] for token_id in ids],
            "output_token_logprobs_length": 3,
            "input_token_logprobs": [],
        },
    }
    assert served.core.prompts == [FIRST]

"""Text completions: several prompts in one call, the log-probabilities of prompts, and what is counted of them."""

import orjson
import pytest

from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import ServedRequest, ServedTokens
from tests.deployments.generation.serving.vllm_layers import Served

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
FIRST, SECOND = [50, 51, 52], [60, 61]


async def test_each_prompt_has_its_choices_and_all_of_them_are_counted() -> None:
    served = Served()
    replies = ["a", "bc", "def", "ghij"]
    for reply in replies:
        served.reply(reply, ends=False)
    body = {"prompt": [FIRST, SECOND], "n": 2, "max_tokens": 9, "return_token_ids": True}
    asked = "call", range(3), 512, (), SamplingOptions()
    request = ServedRequest(*asked, endpoint="completions", body=orjson.dumps(body), choices=4)
    status, content, tokens = await served.carried_out(request)
    choices = orjson.loads(content)["choices"]
    assert (status, tokens) == (200, ServedTokens(prompt=5, generated=10, context=5))
    assert [choice["text"] for choice in choices] == replies
    spans = [choice["weight_versions"] for choice in choices]
    assert spans == [[{"version": "0", "start": 0, "end": length}] for length in (1, 2, 3, 4)]


async def test_no_beams_are_searched() -> None:
    status, refused = await Served().answer("completions", {"prompt": "2", "use_beam_search": True, "n": 2})
    assert (status, refused["error"]["param"]) == (400, "use_beam_search")
    assert refused["error"]["message"].startswith("Text completions take no beam search here.")

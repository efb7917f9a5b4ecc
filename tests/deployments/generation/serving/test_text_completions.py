"""Text completions: several prompts in one call, the log-probabilities of prompts, and what is counted of them."""

from typing import Any

import orjson
import pytest

from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import ServedRequest, ServedTokens
from tests.deployments.generation.serving.vllm_layers import Served
from tests.virtual_time import runs

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
FIRST, SECOND = [50, 51, 52], [60, 61]


@runs
async def test_each_prompt_has_its_choices_and_all_of_them_are_counted() -> None:
    served = Served()
    replies = ["a", "bc", "def", "ghij"]
    for reply in replies:
        served.reply(reply, ends=False)
    body = {"prompt": [FIRST, SECOND], "n": 2, "max_tokens": 9, "return_token_ids": True}
    parts = [part async for part in served.layers.answer(request_of(body))]
    assert parts[-1].tokens == ServedTokens(prompt=5, generated=10)
    for reply in replies:
        served.reply(reply, ends=False)
    status, answer = await served.answer("completions", body)
    assert (status, [choice["text"] for choice in answer["choices"]]) == (200, replies)
    spans = [choice["weight_versions"] for choice in answer["choices"]]
    assert spans == [[{"version": "0", "start": 0, "end": length}] for length in (1, 2, 3, 4)]


def request_of(body: dict[str, Any]) -> ServedRequest:
    return ServedRequest(
        "call", range(3), 512, (), SamplingOptions(), endpoint="completions", body=orjson.dumps(body), choices=4
    )


@runs
async def test_no_beams_are_searched() -> None:
    status, refused = await Served().answer("completions", {"prompt": "2", "use_beam_search": True, "n": 2})
    assert (status, refused["error"]["param"]) == (400, "use_beam_search")
    assert refused["error"]["message"].startswith("Text completions take no beam search here.")

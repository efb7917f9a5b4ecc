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
SCORED: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1}
FIRST, SECOND = [50, 51, 52], [60, 61]


def scores_of(choice: dict[str, Any]) -> list[float | None]:
    return [None if one is None else round(one, 3) for one in choice["logprobs"]["token_logprobs"]]


@pytest.mark.parametrize("max_tokens", [0, 1])
@runs
async def test_each_prompt_of_a_list_is_echoed_with_its_log_probabilities(max_tokens: int) -> None:
    served = Served()
    served.reply("5", ends=False)
    served.reply("6", ends=False)
    status, answer = await served.answer("completions", {**SCORED, "prompt": [FIRST, SECOND], "max_tokens": max_tokens})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    generated = [-0.25] if max_tokens else []
    assert [scores_of(choice) for choice in answer["choices"]] == [
        [None, -0.51, -0.52, *generated],
        [None, -0.61, *generated],
    ]
    assert [choice["weight_versions"] for choice in answer["choices"]] == [[{"version": "0", "start": 0, "end": 1}]] * 2
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 5, "completion_tokens": 2}
    assert sorted(served.core.prompts) == [FIRST, SECOND]


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
async def test_a_prompt_that_is_answered_first_leaves_the_others_alone() -> None:
    served = Served()
    served.reply("5", ends=False)
    served.reply("67890" * 8, ends=False)
    _, answer = await served.answer("completions", {"prompt": ["2 + 3", "2"], "max_tokens": 40})
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert [choice["text"] for choice in answer["choices"]] == ["5", "67890" * 8]
    assert [choice.get("weight_versions") for choice in answer["choices"]] == [None] * 2, "as vLLM answers"
    assert sorted(map(served.core.get_tokenizer().decode, served.core.prompts)) == ["2", "2 + 3"]


@runs
async def test_a_stream_has_the_prompts_log_probabilities_in_its_first_event() -> None:
    served = Served()
    served.reply("56", ends=False)
    body = {**SCORED, "prompt": FIRST, "max_tokens": 2}
    choices = [event["choices"][0] for event in await served.events("completions", body) if event["choices"]]
    assert scores_of(choices[0]) == [None, -0.51, -0.52, -0.25]
    assert "".join(choice["text"] for choice in choices) == "23456"
    assert choices[-1]["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]


@runs
async def test_no_beams_are_searched() -> None:
    status, refused = await Served().answer("completions", {"prompt": "2", "use_beam_search": True, "n": 2})
    assert (status, refused["error"]["param"]) == (400, "use_beam_search")
    assert refused["error"]["message"].startswith("Text completions take no beam search here.")

"""SGLang's `/generate` over vLLM's own layers: what is asked of the engine, and how its outputs are answered."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from deployments.generation.serving import sglang_generate
from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import CallsToAbort, ServedRequest, ServedTokens
from tests.deployments.generation.serving.vllm_layers import Served

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
FIRST, SECOND = [50, 51, 52], [60, 61]
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


async def answered(served: Served, body: dict[str, Any]) -> Any:
    return await served.answered("generate", body)


async def refused(body: dict[str, Any]) -> tuple[str, str]:
    """The field that was refused, and the sentence."""
    served = Served()
    status, answer = await served.answer("generate", body)
    assert (status, served.core.prompts) == (400, [])
    return answer["error"]["param"], answer["error"]["message"]


async def test_a_prompt_of_ids_is_answered_with_ids_and_log_probabilities() -> None:
    served = Served()
    ids = served.reply("42")
    turned_off = {"return_routed_experts": False, "return_indexer_topk": False, "image_data": None}
    assert await answered(served, {"input_ids": FIRST, "return_logprob": True, "rid": "a", **turned_off}) == {
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


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("return_routed_experts", {"return_routed_experts": True}),
        ("image_data", {"image_data": ["data:image/png;base64,AA=="]}),
        ("custom_params", {"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}),
        ("top_logprobs_num", {"top_logprobs_num": 2}),
        ("stop_regex", {"sampling_params": {"stop_regex": "[0-9]"}}),
        ("invented", {"invented": 1}),
    ],
)
async def test_a_field_that_is_not_served_is_refused_by_its_name(field: str, body: dict[str, Any]) -> None:
    param, message = await refused({"input_ids": FIRST, **body})
    assert param == field
    assert f"{field}` of SGLang's API is not served here" in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input_ids"),
        ({"input_ids": FIRST, "text": "2"}, "input_ids"),
        ({"input_ids": [FIRST, []]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": FIRST, "sampling_params": {"max_new_tokens": 510}}, "max_new_tokens"),
        ({"input_ids": FIRST, "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": FIRST, "sampling_params": {"n": 2}, "stream": True}, "stream"),
        ({"input_ids": [FIRST], "stream": True}, "stream"),
    ],
)
async def test_a_body_that_cannot_be_served_names_its_field(body: dict[str, Any], param: str) -> None:
    assert (await refused(body))[0] == param


async def test_sampling_parameters_are_the_engines() -> None:
    served = Served()
    served.reply("5")
    sampling = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": "x", "stop_token_ids": [5]},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.5, "ignore_eos": True},
        **{"skip_special_tokens": False, "spaces_between_special_tokens": False},
    }
    renamed = {"max_new_tokens": 9, "min_new_tokens": 1, "sampling_seed": 11, "no_stop_trim": True}
    await answered(served, {"input_ids": FIRST, "sampling_params": sampling | renamed})
    [params] = served.core.params
    assert {name: getattr(params, name) for name in sampling} == {**sampling, "stop": ["x"]}
    assert (params.max_tokens, params.min_tokens, params.seed, params.include_stop_str_in_output) == (9, 1, 11, True)


@pytest.mark.parametrize("top_k", [-1, 1 << 30, None])
async def test_defaults_are_sglangs(top_k: int | None) -> None:
    served = Served()
    served.reply("5")
    await answered(served, {"input_ids": FIRST, "sampling_params": {"top_k": top_k, "stop": None}})
    served.reply("5")
    await answered(served, {"input_ids": FIRST, "sampling_params": {"max_new_tokens": None}})
    params, unbounded = served.core.params
    assert (params.max_tokens, params.temperature, params.top_k, params.logprobs) == (128, 1.0, 0, None)
    assert unbounded.max_tokens == 509, "it may fill the context"


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "1"), (True, "12")])
async def test_a_stop_string_ends_the_answer_and_is_trimmed_unless_asked_for(no_stop_trim: bool, text: str) -> None:
    served = Served()
    served.reply("123")
    sampling = {"stop": ["2"], "no_stop_trim": no_stop_trim}
    answer = await answered(served, {"input_ids": FIRST, "sampling_params": sampling})
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, {"type": "stop", "matched": "2"})
    assert len(answer["output_ids"]) == 2


async def test_the_log_probabilities_of_a_prompt_begin_with_a_null() -> None:
    served = Served()
    served.reply("5", ends=False)
    sampling = {"max_new_tokens": 0, "temperature": 0}
    body = {"input_ids": FIRST, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 1}
    answer = await answered(served, body)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta = answer["meta_info"]
    scored = [(logprob and round(logprob, 3), token_id) for logprob, token_id, _ in meta["input_token_logprobs"]]
    assert scored == [(None, 51), (-0.52, 52)]
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}


async def test_each_prompt_has_n_answers_with_ids_and_seeds_of_their_own() -> None:
    served = Served()
    for reply in ("a", "bc", "def", "ghij"):
        served.reply(reply, ends=False)
    sampling = {"n": 2, "max_new_tokens": 9, "sampling_seed": 4}
    answers = await answered(served, {"input_ids": [FIRST, SECOND], "sampling_params": sampling, "rid": "r"})
    assert [answer["text"] for answer in answers] == ["a", "bc", "def", "ghij"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1", "r_2", "r_3"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 3, 2, 2]
    assert [params.seed for params in served.core.params] == [4, 5, 4, 5]
    for reply in "cddd":
        served.reply(reply)
    [one] = await answered(served, {"input_ids": [FIRST]})
    assert one["text"] == "c", "a list of one prompt is answered with a list"
    greedy = await answered(served, {"input_ids": FIRST, "sampling_params": {"temperature": 0, "n": 3}})
    assert [answer["text"] for answer in greedy] == ["d"] * 3


async def test_the_longer_an_answer_is_the_rarer_are_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one for each 0.05 s their sizes would add up to half the square of its length."""
    served, seconds = Served(), iter(range(1000))
    monkeypatch.setattr(sglang_generate, "time", SimpleNamespace(monotonic=lambda: next(seconds) * 0.05))
    monkeypatch.setattr(sglang_generate, "TOKENS_OF_EVENT", 2)
    ids = served.reply("x" * 99)
    events = await served.events("generate", {"input_ids": FIRST, "return_logprob": True})
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths[:3] == [1, 2, 3]
    assert (lengths[-1], len(events)) == (len(ids), 12)
    assert sum(lengths) < 2 * 2 * len(ids) + len(ids)


def abortable() -> ServedRequest:
    """A call that the ingress "a" received at its time 4."""
    body = orjson.dumps({"input_ids": FIRST, "rid": "a-1", "return_logprob": True})
    times: dict[str, Any] = {"received_at": 4.0, "age_s": 1.0, "arrived_at": time.monotonic()}
    asked = "call", range(3), 512, (), SamplingOptions()
    return ServedRequest(*asked, endpoint="generate", body=body, ingress="a", **times)


async def test_an_aborted_call_ends_with_the_tokens_that_it_has() -> None:
    served = Served()
    ids = served.reply("4242")
    aborting: list[asyncio.Task[None]] = []

    async def abort() -> None:
        aborting.append(asyncio.create_task(served.aborts.abort(CallsToAbort(None, "a", "a", 5.0))))
        await asyncio.sleep(0.01)

    served.core.meanwhile = abort
    served.core.step = len(ids) - 1
    _, body, tokens = await served.carried_out(abortable())
    await asyncio.gather(*aborting)
    answer = orjson.loads(body)
    assert answer["meta_info"]["finish_reason"] == ABORTED
    assert (answer["text"], answer["output_ids"], tokens) == ("4242", ids[:-1], ServedTokens(3, 4, 3))


@pytest.mark.parametrize(
    ("calls", "is_aborted"),
    [
        (CallsToAbort(None, "", "a", 5.0), True),
        (CallsToAbort(None, "a", "a", 5.0), True),
        (CallsToAbort(None, "b", "a", 5.0), False),
        (CallsToAbort("team", "", "a", 5.0), False),
    ],
)
async def test_a_call_that_comes_after_its_abort_generates_nothing(calls: CallsToAbort, is_aborted: bool) -> None:
    served = Served()
    served.reply("5")
    await served.aborts.abort(calls)
    answer = orjson.loads((await served.carried_out(abortable()))[1])
    assert (answer["meta_info"]["finish_reason"] == ABORTED) is is_aborted
    assert (answer["text"], answer["meta_info"]["weight_version"]) == ("" if is_aborted else "5", "0")
    assert served.core.prompts == ([] if is_aborted else [FIRST])

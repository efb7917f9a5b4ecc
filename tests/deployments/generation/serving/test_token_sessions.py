"""Calls of token ids in sessions, SGLang's and vLLM's: what they continue, and what is recorded of them."""

from typing import Any

import pytest

from deployments.protocols.model_server import Endpoint
from rollout_client.contract.sessions import SessionSample
from tests.deployments.generation.serving.vllm_layers import Served

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
PROMPT = [50, 51, 52]
BETWEEN = [60, 61]
ENDPOINTS: list[Endpoint] = ["generate", "inference/v1/generate"]


def body_of(endpoint: Endpoint, ids: list[int], **sampling: Any) -> dict[str, Any]:
    return {"input_ids" if endpoint == "generate" else "token_ids": ids, "sampling_params": sampling}


async def asked(served: Served, endpoint: Endpoint, ids: list[int], **sampling: Any) -> Any:
    return await served.answered(endpoint, body_of(endpoint, ids, **sampling), "s")


def log_of(sample: SessionSample) -> list[tuple[str, list[int], bool]]:
    return [(each.role, list(each.token_ids), each.generation_logprobs is not None) for each in sample.message_log]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_prompt_that_begins_with_what_was_generated_is_its_next_turn(endpoint: Endpoint) -> None:
    served = await Served().open()
    first, second = served.reply("4"), served.reply("2")
    await asked(served, endpoint, PROMPT)
    answer = await asked(served, endpoint, [*PROMPT, *first, *BETWEEN])
    [sample] = await served.samples()
    if endpoint == "generate":
        assert sample.generation_ids[-1] == answer["meta_info"]["generation_id"], "by it the answer is rewarded"
    else:
        assert answer["choices"][0]["logprobs"] is None, "they are recorded, and not shown unless they are asked for"
    assert list(sample.message_log[1].generation_logprobs or ()) == [-0.25, -0.25]
    assert log_of(sample) == [
        ("user", PROMPT, False),
        ("assistant", first, True),
        ("user", BETWEEN, False),
        ("assistant", second, True),
    ]
    assert [span.version for span in sample.message_log[1].weight_versions or ()] == ["0"]
    assert sample.message_log[0].content == served.core.get_tokenizer().decode(PROMPT)


async def test_both_apis_and_chats_continue_the_same_record() -> None:
    served = await Served().open()
    first, second, third = (served.reply(text) for text in "456")
    body = {"messages": [{"role": "user", "content": "Q"}], "return_token_ids": True}
    prompt = [*(await served.answered("chat/completions", body, "s"))["prompt_token_ids"], *first]
    await asked(served, "generate", [*prompt, *BETWEEN])
    await asked(served, "inference/v1/generate", [*prompt, *BETWEEN, *second])
    [sample] = await served.samples()
    assert [ids for _, ids, is_generated in log_of(sample) if is_generated] == [first, second, third]
    assert [token_id for _, ids, _ in log_of(sample) for token_id in ids] == [*prompt, *BETWEEN, *second, *third]


async def test_a_chat_does_not_go_on_from_a_raw_prompt_that_says_the_same() -> None:
    served = await Served().open()
    raw = served.core.get_tokenizer().encode("Q", add_special_tokens=False)
    served.reply("4")
    served.reply("5")
    await asked(served, "generate", raw)
    messages = [{"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "4"), ("user", "R"))]
    await served.answered("chat/completions", {"messages": messages}, "s")
    assert len(await served.samples()) == 2
    assert served.core.prompts[1][: len(raw)] != raw


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_parameters_that_a_call_leaves_out_are_the_sessions(endpoint: Endpoint) -> None:
    sampling = {"temperature": 0.5, "top_k": 5, "max_new_tokens": 7, "seed": 9, "stop_strings": ["x"]}
    served = await Served().open(sampling=sampling)
    served.reply("4")
    await asked(served, endpoint, PROMPT, top_k=3)
    [params] = served.core.params
    assert (params.temperature, params.top_k, params.max_tokens, params.stop) == (0.5, 3, 7, ["x"])
    assert params.seed is not None


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_stream_is_recorded_before_its_end_is_sent(endpoint: Endpoint) -> None:
    served = await Served().open()
    ids = served.reply("42")
    assert await served.events(endpoint, body_of(endpoint, PROMPT), "s")
    [sample] = await served.samples()
    assert log_of(sample)[1] == ("assistant", ids, True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_ids": [PROMPT, BETWEEN]}, "input_ids"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ],
)
async def test_a_call_that_cannot_be_recorded_is_refused(body: dict[str, Any], param: str) -> None:
    served = await Served().open()
    status, refused = await served.answer("generate", body, "s")
    assert (status, refused["error"]["param"], served.core.prompts) == (400, param, [])


@pytest.mark.parametrize("field", ["kv_transfer_params", "content_parts", "priority"])
async def test_vllms_fields_that_go_past_the_service_are_refused_by_name(field: str) -> None:
    value: Any = {"kv_transfer_params": {"a": 1}, "content_parts": [{"type": "image_url"}], "priority": 3}[field]
    body = {**body_of("inference/v1/generate", PROMPT), field: value}
    status, refused = await Served().answer("inference/v1/generate", body)
    assert (status, refused["error"]["param"]) == (400, field)
    assert f"`{field}` is not served here" in refused["error"]["message"]


async def test_vllms_answer_says_which_weights_made_its_ids() -> None:
    served = Served()
    ids = served.reply("42")
    body = body_of("inference/v1/generate", PROMPT, logprobs=0)
    [choice] = (await served.answered("inference/v1/generate", body))["choices"]
    assert choice["token_ids"] == ids
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-0.25] * 3
    named = [(one["token_id"], one["token"]) for one in choice["logprobs"]["content"]]
    assert named == [(token_id, f"token_id:{token_id}") for token_id in ids], "as vLLM named them before 0.32"

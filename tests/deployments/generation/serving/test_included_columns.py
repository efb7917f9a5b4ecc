"""The columns that a session includes, recorded through vLLM's own layers, whatever its calls ask for."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.policy.commands import LoadedWeights
from deployments.protocols.model_server import Endpoint
from deployments.protocols.token_columns import packed_rows
from rollout_client.contract.messages import COLUMN_FIELDS, Message
from rollout_client.contract.sessions import SessionSample
from tests.deployments.generation.serving.vllm_layers import Served, experts_between

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
TOP_K, TOP = 3, 2
INCLUDE = ["routed_experts", f"top_logprobs:{TOP}", "sampling_mask", "entropy"]
SAMPLING: dict[str, Any] = {"top_k": TOP_K, "max_new_tokens": 40}
QUESTION, MORE = {"role": "user", "content": "2 + 3?"}, {"role": "user", "content": "And 1 + 1?"}
ENDPOINTS: list[Endpoint] = ["chat/completions", "responses", "messages"]


async def served(**opened: Any) -> Served:
    replica = await Served().open(**{"include": INCLUDE, "sampling": SAMPLING, **opened})
    replica.core.returns_experts = True
    return replica


def body_of(endpoint: Endpoint, *messages: dict[str, Any], **asked: Any) -> dict[str, Any]:
    if endpoint == "responses":
        return {"input": list(messages), **asked}
    bound = {"max_tokens": 40} if endpoint == "messages" else {}
    return {"model": "small", "messages": list(messages), **bound, **asked}


def columns_of(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in COLUMN_FIELDS if getattr(message, name) is not None}


def expected(log: Sequence[Message]) -> list[dict[str, Any]]:
    """The columns of the scripted engine, which depend on the tokens alone."""
    ids = [token_id for message in log for token_id in message.token_ids]
    rows, found, first = experts_between(ids, 0).astype("uint8"), [], 0
    for message in log:
        own, first = rows[first : first + len(message.token_ids)], first + len(message.token_ids)
        columns: dict[str, Any] = {"routed_experts": packed_rows(own.flatten().tolist(), "uint8", [2, 1])}
        if message.generation_logprobs is not None:
            tokens = len(message.token_ids)
            after = [[token_id + 1 + place for place in range(TOP_K)] for token_id in message.token_ids]
            columns |= {
                "top_token_ids": packed_rows([one for row in after for one in row[:TOP]], "int32", [TOP]),
                "top_logprobs": packed_rows([-0.25] * TOP * tokens, "float32", [TOP]),
                "sampling_mask": packed_rows([one for row in after for one in row], "int32"),
                "sampling_mask_sizes": packed_rows([TOP_K] * tokens, "uint16"),
                "entropy": packed_rows([TOP_K * math.exp(-0.25) * 0.25] * tokens, "float32"),
            }
        found.append(columns)
    return found


def assert_columns(samples: Sequence[SessionSample]) -> None:
    for sample in samples:
        assert [columns_of(message) for message in sample.message_log] == expected(sample.message_log)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_api_records_the_columns_over_turns_and_forks(endpoint: Endpoint, streams: bool) -> None:
    replica = await served()
    replica.core.step = 2

    async def call(*messages: dict[str, Any]) -> None:
        await (replica.events if streams else replica.answered)(endpoint, body_of(endpoint, *messages), "s")

    for reply, messages in (
        ("5", [QUESTION]),
        ("2", [QUESTION, {"role": "assistant", "content": "5"}, MORE]),
        ("Yes.", [QUESTION, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"}]),
        ("6", [QUESTION]),
    ):
        replica.reply(reply)
        await call(*messages)
    samples = await replica.samples()
    assert [len(sample.message_log) for sample in samples] == [4, 4, 2]
    assert_columns(samples)
    begins = [params.routed_experts_prompt_start for params in replica.core.params]
    known = len(samples[0].message_log[0].token_ids) + len(samples[0].message_log[1].token_ids) - 1
    assert begins == [0, known, known, 0]


@pytest.mark.parametrize("asked", [{}, {"logprobs": True, "top_logprobs": 5}, {"logprobs": True, "top_logprobs": 60}])
async def test_what_a_caller_is_shown_is_what_it_asked_for(asked: dict[str, Any]) -> None:
    replica, plain = await served(), await Served().open(sampling=SAMPLING)
    answers = []
    for one in (replica, plain):
        one.reply("5")
        one.reply("five")
        _, answer = await one.answer("chat/completions", body_of("chat/completions", QUESTION, n=2, **asked), "s")
        answers.append({name: value for name, value in answer.items() if name != "created"})
    assert answers[0] == answers[1]
    samples = await replica.samples()
    assert len(samples) == 2
    assert_columns(samples)
    assert [set(columns_of(one)) for sample in await plain.samples() for one in sample.message_log] == [set()] * 4


@pytest.mark.parametrize("streams", [False, True])
async def test_an_interrupted_call_has_the_columns_of_all_its_tokens(streams: bool) -> None:
    replica = await served()
    core = replica.core
    update_after(replica, requests=2)
    for text in ("What is five?", " It is five,", " not six."):
        replica.reply(text)
    body = body_of("chat/completions", QUESTION)
    await (replica.events if streams else replica.answered)("chat/completions", body, "s")
    assert len(core.prompts) == 3
    [sample] = await replica.samples()
    assert_columns([sample])
    begins = [params.routed_experts_prompt_start for params in core.params]
    assert begins == [0, *[len(prompt) - 1 for prompt in core.prompts[1:]]]


def update_after(replica: Served, requests: int) -> None:
    """Updates of the weights end so many requests of the engine before the last three of their tokens."""
    engine, core = replica.engine, replica.core

    async def update() -> None:
        core.meanwhile = None if len(core.prompts) == requests else update
        engine.weights.aborts += 1
        engine.weights.loaded = LoadedWeights(engine.weights.loaded.version + 1)
        await core.abort_all()

    core.meanwhile, core.step = update, 3


async def test_a_divided_stop_string_leaves_no_rows_of_the_tokens_after_it() -> None:
    replica = await served()
    update_after(replica, requests=1)
    replica.reply("wxa???", ends=False)
    replica.reply("bcdefg", ends=False)
    await replica.events("chat/completions", body_of("chat/completions", QUESTION, stop=["ab"]), "s")
    [sample] = await replica.samples()
    assert list(sample.message_log[-1].token_ids) == list(b"wxab")
    assert_columns([sample])
    whole = await served()
    whole.core.step = 8
    whole.reply("one two three four five")
    await whole.answer("chat/completions", body_of("chat/completions", QUESTION, stop=["two"]), "s")
    [sample] = await whole.samples()
    assert sample.message_log[-1].finish_reason == "stop"
    assert_columns([sample])


INCLUDED = "ession includes top_logprobs, sampling_mask, entropy: send a "
WARM = f"{INCLUDED}temperature of at least 0.01: greedy decoding draws from no distribution."
BOUNDED = f"{INCLUDED}top_k from 1 to 32, or leave it to the session."
OTHERS = "A session that includes top_logprobs, sampling_mask, entropy takes no `{}`: leave it out."


@pytest.mark.parametrize(
    ("endpoints", "asked", "message"),
    [
        *((ENDPOINTS, {"temperature": temperature}, WARM) for temperature in (0, 1e-6)),
        *((ENDPOINTS, {"top_k": top_k}, BOUNDED) for top_k in (-1, 0, 33)),
        (ENDPOINTS[:1], {"logprobs": True, "logprob_token_ids": [3]}, OTHERS.format("logprob_token_ids")),
        (ENDPOINTS[:1], {"logprobs": True, "prompt_logprobs": 1}, OTHERS.format("prompt_logprobs")),
    ],
)
async def test_a_call_that_leaves_no_place_for_the_columns_is_refused(
    endpoints: list[Endpoint], asked: dict[str, Any], message: str
) -> None:
    replica = await served()
    for endpoint in endpoints:
        status, refused = await replica.answer(endpoint, body_of(endpoint, QUESTION, **asked), "s")
        assert (status, message in refused["error"]["message"]) == (400, True), refused
    info = await replica.store.info("s", "")
    assert (info.calls, info.calls_in_flight, replica.core.prompts) == (0, 0, [])


async def test_a_session_that_includes_experts_alone_takes_any_sampling() -> None:
    replica = await served(include=["routed_experts"])
    replica.reply("5")
    asked: dict[str, Any] = {"logprobs": True, "prompt_logprobs": 1, "temperature": 0}
    status, answer = await replica.answer("chat/completions", body_of("chat/completions", QUESTION, **asked), "s")
    assert (status, answer["choices"][0].get("routed_experts")) == (200, None)
    [sample] = await replica.samples()
    columns = [columns_of(message) for message in sample.message_log]
    assert columns == [{"routed_experts": one["routed_experts"]} for one in expected(sample.message_log)]

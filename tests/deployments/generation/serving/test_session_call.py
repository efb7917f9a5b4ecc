"""Calls of a session beside the engine: their prompts, their records, and what becomes of those that are left."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from deployments.failures import ReplicaShuttingDown
from deployments.generation.engine_outputs import GeneratedChoice
from deployments.generation.serving import session_call
from deployments.generation.serving.answered_layers import _prepare_chat, _shown_output
from deployments.generation.serving.served_call import ServedCall
from deployments.generation.serving.session_call import SessionCall, SessionCallClient, _ShownChoices, shown_message
from deployments.generation.serving.session_renderer import _context_of
from deployments.protocols.generation import SamplingOptions, WeightSpan, derived_seed, packed_ids, packed_logprobs
from deployments.protocols.images import ImageTokens
from deployments.protocols.model_server import ServedRequest, ServedTokens
from deployments.sessions.records import ChatContext, OpenSession
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client.contract.base import RolloutDemand
from rollout_client.contract.rollouts import Sampling
from rollout_client.contract.sessions import SessionRequest, SessionSample
from tests.deployments.sessions.renderer import PLAIN, small
from tests.fakes.storage import ScriptedStorage

QUESTION = {"role": "user", "content": "What is 2 + 3?"}
MORE = {"role": "user", "content": "And 1 + 1?"}


class Replica:
    """The calls of one session over a store in this process. The engine ends a call when it is interrupted."""

    def __init__(self) -> None:
        self.store = SessionStore(SessionsSettings(), ScriptedStorage())
        unchecked: Any = self.store
        renderer: Any = small()
        self.calls = SessionCallClient(unchecked, renderer, self._interrupt, no_image_tokens)
        self.interrupted: list[str] = []
        self._running: dict[str, ServedCall] = {}

    async def open(self, request: SessionRequest | None = None) -> "Replica":
        await self.store.open(OpenSession("s", "", "", "http://service", request or SessionRequest()))
        return self

    def call(self, name: str) -> ServedCall:
        request = ServedRequest(name, range(3), 8, (), SamplingOptions(), session_id="s")
        session = SessionCall(request, "s", self.calls)
        session.answer_id = f"chatcmpl-{name}"
        call = ServedCall(request, session)
        self._running[name] = call
        return call

    async def samples(self) -> list[SessionSample]:
        return (await self.store.samples("s", "")).samples

    async def _interrupt(self, names: Sequence[str]) -> None:
        for name in names:
            self.interrupted.append(name)
            ended = self._running[name].engine_ended
            assert ended is not None
            ended.set()


async def no_image_tokens(names: Sequence[str]) -> list[ImageTokens]:
    raise AssertionError(names)


def generate(call: ServedCall, text: str, finish_reason: str | None = "stop", index: int = 0) -> list[int]:
    """What the recording client notes while the engine generates."""
    call.engine_ended = call.engine_ended or asyncio.Event()
    ids = [*small().encode(text), *([small().end_of_turn] if finish_reason == "stop" else [])]
    spans = (WeightSpan("3", 0, len(ids)),)
    call.choices[index] = GeneratedChoice(packed_ids(ids), packed_logprobs([-0.5] * len(ids)), finish_reason, spans)
    return ids


async def prepared(call: ServedCall, messages: list[Any], context: ChatContext = PLAIN) -> list[int]:
    assert call.session is not None
    return list(await call.session.prepare(messages, context))


async def begun() -> tuple[Replica, ServedCall]:
    """The first call of a session, before the engine generates."""
    replica = await Replica().open()
    call = replica.call("one")
    await prepared(call, [QUESTION])
    return replica, call


async def test_the_prompt_of_a_call_that_continues_another_begins_with_its_ids() -> None:
    replica = await Replica().open()
    first = replica.call("one")
    prompt = await prepared(first, [QUESTION])
    assert prompt == small().fresh([QUESTION], PLAIN)
    made = generate(first, "5")
    await first.record({0: {"role": "assistant", "content": "5"}})
    second = replica.call("two")
    continued = await prepared(second, [QUESTION, {"role": "assistant", "content": " 5\n"}, MORE])
    assert continued[: len(prompt) + len(made)] == prompt + made
    second.prompts = {0: len(continued)}
    assert second.tokens == ServedTokens(len(continued) - len(prompt) - len(made), 0, len(continued))
    [sample] = await replica.samples()
    assert (sample.branch, sample.status) == ("chatcmpl-one", "completed")


@pytest.mark.parametrize(("policy", "oldest"), [(None, 3), ("run-b", None)])
async def test_the_engine_learns_the_oldest_version_a_call_continues(policy: str | None, oldest: int | None) -> None:
    replica = await Replica().open(SessionRequest(policy=RolloutDemand(name=policy)))
    first, second = replica.call("one"), replica.call("two")
    await prepared(first, [QUESTION])
    assert first.generation([1], 8).oldest_version is None
    generate(first, "5")
    await first.record({})
    await prepared(second, [QUESTION, {"role": "assistant", "content": "5"}, MORE])
    assert second.generation([1], 8).oldest_version == oldest


async def test_each_choice_of_an_answer_is_recorded_by_its_index() -> None:
    replica, call = await begun()
    for index in (1, 0):
        generate(call, f"answer {index}", index=index)
    await call.record({})
    samples = await replica.samples()
    assert [sample.branch for sample in samples] == ["chatcmpl-one-0", "chatcmpl-one-1"]
    assert [sample.message_log[-1].content for sample in samples] == ["answer 0", "answer 1"]


async def test_a_call_that_is_left_is_interrupted_and_recorded_as_far_as_it_came() -> None:
    replica, call = await begun()
    ids = generate(call, "half of an ans", "abort")
    call.leave()
    await replica.calls.tasks.ended()
    [sample] = await replica.samples()
    assert (replica.interrupted[0], sample.status) == ("one", "cancelled")
    assert list(sample.message_log[-1].token_ids) == ids
    assert (await replica.store.info("s", "")).calls_in_flight == 0


async def test_what_another_replica_makes_anew_is_not_recorded() -> None:
    replica, call = await begun()
    generate(call, "half of an ans", None)
    call.note_failure(ReplicaShuttingDown("it ends"))
    call.leave()
    await replica.calls.tasks.ended()
    info = await replica.store.info("s", "")
    assert (info.calls, info.calls_in_flight, info.branches) == (0, 0, 0)


async def test_a_session_that_is_ended_elsewhere_interrupts_its_calls_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_call, "HEARD_EVERY_S", 0)
    replica, call = await begun()
    generate(call, "5", None)
    await replica.store.end("s", "")
    assert call.engine_ended is not None
    await call.engine_ended.wait()
    assert "one" in replica.interrupted


def test_what_vllm_adds_to_the_arguments_of_a_template_makes_no_other_root() -> None:
    given = {"tools": None, "tokenize": False, "add_generation_prompt": True, "continue_final_message": False}
    assert _context_of(None, {**given, "documents": None}) == PLAIN
    assert _context_of([], {**given, "enable_thinking": False}) == ChatContext(None, {"enable_thinking": False})


# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]


def asked_chat(index: int = 0, sampling: Sampling | None = None, **asked: object) -> ChatCompletionRequest:
    request = ChatCompletionRequest.model_validate({"messages": [], "model": "gpt-4o", **asked})
    sent = ServedRequest("one", (), 1, (), SamplingOptions(), session_sampling=sampling, generation_index=index)
    _prepare_chat(request, ServedCall(sent))
    return request


def test_a_field_that_a_call_leaves_out_is_the_sessions() -> None:
    request = asked_chat(sampling=Sampling(temperature=0.3, seed=5, max_new_tokens=9), top_p=0.5)
    assert (request.temperature, request.top_p, request.seed, request.max_completion_tokens) == (0.3, 0.5, 5, 9)


def test_equal_seeds_of_a_groups_sessions_sample_differently() -> None:
    assert [asked_chat(index, seed=5).seed for index in range(3)] == [5, derived_seed(5, 1), derived_seed(5, 2)]


def event(*choices: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': list(choices)})}\n\n"


def test_the_deltas_of_each_choice_are_joined() -> None:
    shown = _ShownChoices()
    shown.note(event({"index": 0, "delta": {"role": "assistant", "content": ""}}))
    shown.note(event({"index": 1, "delta": {"content": "B"}}, {"index": 0, "delta": {"reasoning": "why"}}))
    shown.note(event({"index": 0, "delta": {"content": "A"}}, {"index": 0, "delta": {"content": "a"}}))
    for without_choices in (event(), 'data: {"error": {"message": "it broke"}}\n\n', "data: [DONE]\n\n"):
        shown.note(without_choices)
    assert shown.messages == {
        0: {"role": "assistant", "content": "Aa", "reasoning": "why"},
        1: {"role": "assistant", "content": "B"},
    }


def test_the_parts_of_tool_calls_are_joined() -> None:
    shown = _ShownChoices()
    first = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}}
    second = {"index": 1, "id": "c2", "function": {"name": "sub", "arguments": "{}"}}
    shown.note(event({"index": 0, "delta": {"tool_calls": [first]}}))
    shown.note(event({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}}))
    shown.note(event({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}, second]}}))
    assert shown.messages[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]
    assert shown.messages[0]["content"] is None


def test_a_message_keeps_the_fields_by_which_it_is_known_again() -> None:
    said = {"role": "assistant", "content": "A"}
    assert shown_message({**said, "refusal": None, "tool_calls": []}) == said


def test_the_items_of_a_response_are_one_message() -> None:
    part = SimpleNamespace
    items = [
        part(type="reasoning", content=[part(text="why")]),
        part(type="message", content=[part(text="A"), part(text="B")]),
        part(type="function_call", call_id="c1", name="add", arguments="{}"),
    ]
    assert _shown_output(items) == {
        "role": "assistant",
        "content": "AB",
        "reasoning": "why",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    }

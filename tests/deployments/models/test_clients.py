"""The client of OpenAI-compatible servers, over real sockets: what it sends, when it asks again, what it hides."""

import asyncio
import random
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.models import clients
from deployments.models.clients import LONGEST_PAUSE_S, HttpChatModel, _AttemptFailed, _pause_s
from deployments.models.settings import ChatModelSettings
from deployments.strict_settings import KeyMissing
from rollout_env import ChatMessage, ModelRefused, ModelReply, ModelUnavailable
from tests.deployments.models.chat_server import Answer, ChatServer, chat_server, said
from tests.growing_limits import in_the_middle
from tests.patterns import whole

QUESTION: list[ChatMessage] = [{"role": "user", "content": "Q"}]
BUSY = Answer(status=503, body={"error": "busy"})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_PAUSE_S", 0.0)


def settings(server: ChatServer, **fields: Any) -> ChatModelSettings:
    return ChatModelSettings.model_validate({"base_url": server.url, "model": "judge-1", **fields})


def chat(
    server: ChatServer, asked: dict[str, Any] | None = None, messages: list[ChatMessage] = QUESTION, **fields: Any
) -> ModelReply:
    return asyncio.run(HttpChatModel(settings(server, **fields), "judge").chat(messages, **(asked or {})))


def test_a_request_has_model_messages_and_parameters_of_config_and_call() -> None:
    with chat_server(lambda *_: said("A")) as server:
        reply = chat(server, {"temperature": 0.5}, parameters={"temperature": 0, "max_tokens": 9})
    assert server.requests == [
        {
            "path": "/v1/chat/completions",
            "model": "judge-1",
            "temperature": 0.5,
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "Q"}],
        }
    ]
    assert (reply.content, reply.prompt_tokens, reply.completion_tokens, reply.attempts) == ("A", 7, 3, 1)
    assert reply.seconds > 0


def test_a_policy_of_this_service_is_asked_at_its_own_address() -> None:
    with chat_server(lambda *_: said("A")) as server:
        for fields in ({"policy": "run b", "version": 3}, {}, {"priority": 2.5}):
            policy = ChatModelSettings.model_validate(fields)
            asyncio.run(HttpChatModel(policy, "rival", lambda: server.url.removesuffix("/v1")).chat(QUESTION))
    messages = [{"role": "user", "content": "Q"}]
    assert server.requests == [
        {"path": "/v1/chat/completions?policy=run+b&version=3", "messages": messages},
        {"path": "/v1/chat/completions", "messages": messages},
        {"path": "/v1/chat/completions?priority=2.5", "messages": messages},
    ]


def test_calls_and_reasoning_of_the_model_are_in_its_reply() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with chat_server(lambda *_: said(None, tool_calls=[call], reasoning_content="Hm.")) as server:
        reply = chat(server)
    assert (reply.content, reply.tool_calls, reply.reasoning_content) == ("", [call], "Hm.")


def test_only_what_openai_knows_of_a_message_is_sent() -> None:
    messages: list[ChatMessage] = [
        {"role": "environment", "content": "E"},
        {"role": "assistant", "content": "A", "reasoning_content": "Hm.", "parse_error": "no"},
    ]
    with chat_server(lambda *_: said("A")) as server:
        chat(server, messages=messages)
    assert server.requests[0]["messages"] == [{"role": "user", "content": "E"}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize(
    "failure",
    [
        BUSY,
        Answer(status=429, headers={"retry-after": "0"}),
        Answer(status=500),
        Answer(body=b"no"),
        Answer(closes=True),
    ],
)
def test_what_may_pass_is_asked_again(failure: Answer) -> None:
    with chat_server(lambda number, _: failure if number < 2 else said("A")) as server:
        reply = chat(server)
    assert (reply.content, reply.attempts, len(server.requests)) == ("A", 3, 3)


def test_a_server_that_stays_busy_is_given_up_after_the_retries() -> None:
    message = whole("The model judge did not answer (attempts: 3): status 503.")
    with chat_server(lambda *_: BUSY) as server, pytest.raises(ModelUnavailable, match=message):
        chat(server, retries=2)
    assert len(server.requests) == 3


def test_a_server_that_does_not_answer_in_time_is_asked_again() -> None:
    def attempts(timeout_s: float) -> int | None:
        never = threading.Event()
        with chat_server(lambda number, _: Answer(waits_for=never) if number == 0 else said("A")) as server:
            try:
                return chat(server, timeout_s=timeout_s).attempts
            except ModelUnavailable:
                return None
            finally:
                never.set()

    assert in_the_middle(attempts, has_begun=lambda number: number == 2) == 2


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with chat_server(lambda *_: said("A")) as server:
        pass
    with pytest.raises(ModelUnavailable, match="ConnectError"):
        chat(server, retries=1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(status=400, body={"error": "bad model"}), 'answers 400: {"error": "bad model"}'),
        (Answer(status=401, body={}), "answers 401"),
        (Answer(body={"choices": []}), "no chat completion"),
        (Answer(body=[]), "no chat completion"),
    ],
)
def test_a_request_that_is_refused_is_not_made_again(answer: Answer, says: str) -> None:
    with chat_server(lambda *_: answer) as server, pytest.raises(ModelRefused, match=re.escape(says)):
        chat(server)
    assert len(server.requests) == 1


def test_no_more_calls_are_under_way_than_the_config_permits() -> None:
    go_on, all_there = threading.Event(), threading.Event()

    def answer(number: int, _: Any) -> Answer:
        if number == 2:
            all_there.set()
        return Answer(body=said("A").body, waits_for=go_on)

    async def scenario(server: ChatServer) -> list[ModelReply]:
        model = HttpChatModel(settings(server, max_concurrent_calls=3), "judge")
        calls = [asyncio.create_task(model.chat(QUESTION)) for _ in range(8)]
        await asyncio.to_thread(all_there.wait, 20)
        go_on.set()
        return await asyncio.gather(*calls)

    with chat_server(answer) as server:
        replies = asyncio.run(scenario(server))
    assert [reply.content for reply in replies] == ["A"] * 8
    assert server.most_under_way == 3


def test_the_key_comes_from_the_environment_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with chat_server(lambda *_: Answer(status=400, body={})) as server, pytest.raises(ModelRefused) as raised:
        chat(server, api_key_variable="JUDGE_KEY")
    assert server.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(raised.value)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(KeyMissing, match="JUDGE_KEY holds no key"):
        HttpChatModel(settings(server, api_key_variable="JUDGE_KEY"), "judge")


@pytest.mark.parametrize("url", ["http://a:b@host/v1", "http://host/v1?key=1", "host/v1", "ftp://host"])
def test_an_address_with_a_key_or_without_a_scheme_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        ChatModelSettings.model_validate({"base_url": url, "model": "m"})
    with pytest.raises(ValidationError, match="model is missing"):
        ChatModelSettings.model_validate({"base_url": "http://judge/v1"})


def test_the_pause_doubles_and_is_at_least_what_the_server_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(random, "uniform", max)

    def pause_s(attempt: int, wait_s: float) -> float:
        outcome = SimpleNamespace(exception=lambda: _AttemptFailed("busy", wait_s))
        state: Any = SimpleNamespace(attempt_number=attempt, outcome=outcome)
        return _pause_s(state)

    asked = [(1, 0), (3, 0), (9, 0), (1, 5), (1, 10**6)]
    assert [pause_s(*each) for each in asked] == [1, 4, LONGEST_PAUSE_S, 6, LONGEST_PAUSE_S + 1]

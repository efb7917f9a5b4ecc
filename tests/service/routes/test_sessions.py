"""The routes of `/sessions`: their keys, what reaches the model server, and what can be read and rewarded."""

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.failures import EnvironmentLost, EnvironmentRejected, RolloutFailure, TurnTimedOut
from deployments.protocols.generation import IncludedColumns, WeightSpan, packed_ids, packed_logprobs
from deployments.protocols.model_server import TOKEN_ENDPOINTS
from deployments.protocols.token_columns import Columns, packed_rows
from deployments.sessions.records import ChatContext, EngineCall, GeneratedMessage, RenderedMessage
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleInput
from rollout_client.contract.sessions import SessionSample
from service.access.access_control import CHECK_PERIOD_S, OPEN_TO_ALL, AccessControl
from service.rollouts import retries
from tests.deployments.storage.scripted_storage import ScriptedStorage
from tests.service.keyed_http import access_of_a_key
from tests.service.scripted import outcome
from tests.service.scripted_http import ScriptedHttp
from tests.service.scripted_model_server import ScriptedModelServer

JSON = {"content-type": "application/json"}
NO_NUMBERS: Columns = {}


class Opened:
    """A service with one session."""

    def __init__(
        self, request: dict[str, Any] | None = None, access: AccessControl = OPEN_TO_ALL, key: str = ""
    ) -> None:
        self.server = ScriptedModelServer()
        self.store = SessionStore(SessionsSettings(), ScriptedStorage())
        self.service = ScriptedHttp(access=access, model_server=self.server, session_store=self.store)
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        opened = self.service.request("POST", "/v1/sessions", json=request or {}, headers=self.headers)
        assert opened.status_code == 201, opened.text
        self.info = opened.json()
        self.path = f"/v1/sessions/{self.info['id']}"
        assert opened.headers["location"] == self.path

    def get(self, path: str = "") -> httpx.Response:
        return self.service.request("GET", self.path + path, headers=self.headers)

    def call(
        self,
        endpoint: str = "chat/completions",
        key: str | None = None,
        content: bytes = b'{"n": 2}',
        **headers: str,
    ) -> httpx.Response:
        sent = {"authorization": f"Bearer {key or self.info['api_key']}"} | JSON | headers
        below = "" if endpoint in TOKEN_ENDPOINTS else "/v1"
        return self.service.request("POST", f"{self.path}{below}/{endpoint}", content=content, headers=sent)


def test_a_session_has_an_address_and_a_key_of_its_own() -> None:
    opened = Opened()
    assert opened.info["base_url"] == f"http://service{opened.path}"
    assert opened.info["status"] == "open"
    assert opened.info["api_key"].startswith("session-")
    assert "api_key" not in opened.get().json()
    assert [one["id"] for one in opened.service.request("GET", "/sessions").json()["sessions"]] == [opened.info["id"]]


@pytest.mark.parametrize("name", sorted(SessionSample.model_fields.keys() - SampleInput.model_fields.keys()))
def test_a_further_field_named_as_one_of_the_result_is_refused(name: str) -> None:
    opened = Opened()
    refused = opened.service.request(
        "POST", "/v1/sessions", json={"sample": {"task_name": "math", "level": 3, name: 42}}
    )
    assert refused.status_code == 422
    message = "this is a field of the result; give the further field another name"
    assert refused.json()["errors"] == [{"field": f"sample.{name}", "message": message, "value": None}]
    assert [one["id"] for one in opened.service.request("GET", "/sessions").json()["sessions"]] == [opened.info["id"]]


@pytest.mark.parametrize(
    "endpoint",
    ["chat/completions", "responses", "messages", "messages/count_tokens", "tokenize", *TOKEN_ENDPOINTS],
)
def test_a_call_reaches_the_model_server_as_one_of_the_session(endpoint: str) -> None:
    opened = Opened({"sampling": {"temperature": 0.5, "seed": 3}, "policy": {"min_version": 0}, "priority": "batch"})
    assert opened.call(endpoint).json() == {"id": "a"}
    assert opened.call(endpoint).json() == {"id": "a"}
    first, second = opened.server.requests
    assert (first.endpoint, first.body, first.session_id, first.rollout_id) == (
        endpoint,
        b'{"n": 2}',
        opened.info["id"],
        opened.info["id"],
    )
    assert first.choices == (2 if endpoint == "chat/completions" else 1)
    assert first.generation_id != second.generation_id
    assert (first.share.id, first.share.weight) == (opened.info["id"], 1 / 16)
    assert first.session_sampling is not None
    assert first.session_sampling.temperature == 0.5
    assert first.session_sampling == second.session_sampling
    assert opened.server.released == []


@pytest.mark.parametrize("endpoint", TOKEN_ENDPOINTS)
def test_a_call_of_token_ids_leaves_the_weights_to_its_session(endpoint: str) -> None:
    opened = Opened()
    for field, body in (
        ("weight_version", b'{"weight_version": {"min_version": 1}}'),
        ("lora_path", b'{"lora_path": "a"}'),
    ):
        refused = opened.call(endpoint, content=body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, field)
    assert opened.server.requests == []
    unconstrained = b'{"weight_version": {"min_version": null, "exact_version": null}, "lora_path": null}'
    assert opened.call(endpoint, content=unconstrained).status_code == 200


def test_a_session_includes_what_a_rollout_could() -> None:
    opened, asked = Opened(), {"include": ["entropy"]}
    refused = opened.service.request("POST", "/v1/sessions", json=asked)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "include[0]")
    rollout = opened.service.post(
        {"samples": [{"task_name": "math", "messages": [{"role": "user", "content": "Q"}]}], **asked}
    )
    assert rollout.json()["errors"] == refused.json()["errors"]


def test_calls_of_a_session_carry_what_it_includes() -> None:
    opened = Opened({"include": ["top_logprobs:3", "entropy"], "sampling": {"top_k": 5}})
    plain = Opened()
    assert (opened.call().status_code, plain.call().status_code) == (200, 200)
    assert [one.server.requests[0].include for one in (opened, plain)] == [
        IncludedColumns(top_logprobs=3, entropy=True),
        IncludedColumns(),
    ]


def test_a_session_has_no_text_completions() -> None:
    opened = Opened()
    assert opened.call("completions").status_code == 404
    assert opened.server.requests == []


def test_a_call_needs_the_key_of_its_session() -> None:
    opened = Opened()
    refused = opened.call(key="session-other")
    assert (refused.status_code, refused.json()["type"]) == (401, "urn:rollout:problem:not-authenticated")
    without = opened.service.request("POST", f"{opened.path}/v1/chat/completions", content=b"{}", headers=JSON)
    assert without.status_code == 401
    assert opened.server.requests == []
    by_header = {**JSON, "x-api-key": opened.info["api_key"]}
    answer = opened.service.request("POST", f"{opened.path}/v1/messages", content=b"{}", headers=by_header)
    assert answer.status_code == 200


def test_the_key_of_a_session_opens_nothing_else(tmp_path: Path) -> None:
    opened = keyed(tmp_path)
    headers = {"authorization": f"Bearer {opened.info['api_key']}"}
    assert opened.service.request("GET", opened.path, headers=headers).status_code == 401
    assert opened.call().status_code == 200
    [request] = opened.server.requests
    assert (request.share.key, request.share.key_weight) == ("team", 4.0)


def test_a_session_ends_with_the_key_that_opened_it(tmp_path: Path) -> None:
    clock = [0.0]
    opened = keyed(tmp_path, lambda: clock[0])
    (tmp_path / "keys.json").write_text('{"keys": []}')
    assert opened.call().status_code == 200
    clock[0] = CHECK_PERIOD_S
    assert opened.call().status_code == 401


def keyed(folder: Path, now_s: Callable[[], float] = time.monotonic) -> Opened:
    access, key = access_of_a_key(folder, now_s, weight=4)
    return Opened(access=access, key=key)


def test_a_reward_that_names_an_unknown_message_is_refused() -> None:
    opened = Opened()
    rewarded = opened.service.request("POST", f"{opened.path}/reward", json={"reward": 1.0})
    assert (rewarded.status_code, rewarded.json()["id"]) == (200, opened.info["id"])
    refused = opened.service.request("POST", f"{opened.path}/reward", json={"reward": 1.0, "generation_id": "x"})
    assert (refused.status_code, refused.json()["type"]) == (404, "urn:rollout:problem:generation-unknown")


JUDGED = {"task_name": "math", "idx": 4, "extra_env_info": {"ground_truth": "5"}}


def judged(reward: Any, sample: dict[str, Any] | None = JUDGED, **target: str) -> tuple[Opened, httpx.Response]:
    """A session with one call, and the answer to its judgement, which the environment `math` makes."""
    opened = Opened({} if sample is None else {"sample": sample})
    asyncio.run(record_a_call(opened.store, opened.info["id"]))
    opened.service.environments["math"].script = [reward if isinstance(reward, Exception) else outcome(reward=reward)]
    sent = {"judge": True, **target}
    return opened, opened.service.request("POST", f"{opened.path}/reward", json=sent)


def test_the_environment_of_the_task_judges_the_last_branch() -> None:
    opened, answer = judged({"right": 1.0, "form": 0.5})
    assert (answer.status_code, answer.json()["id"]) == (200, opened.info["id"])
    [step] = opened.service.environments["math"].requests
    assert step.message_log == [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "5", "token_count": 2, "finish_reason": "stop"},
    ]
    assert (step.extra_env_info, step.sample, step.is_start) == ({"ground_truth": "5"}, 4, False)
    [sample] = opened.get("/samples").json()["samples"]
    assert (sample["rewards"], sample["total_reward"]) == ({"right": 1.0, "form": 0.5}, 1.5)
    assert sample["message_log"][1]["reward"] is None


def test_a_judgement_of_a_message_is_its_reward_alone() -> None:
    opened, answer = judged(0.25, generation_id="answer")
    assert answer.status_code == 200
    [sample] = opened.get("/samples").json()["samples"]
    assert (sample["rewards"], sample["message_log"][1]["reward"]) == ({"reward": 0.25}, 0.25)


def test_a_judgement_of_an_earlier_message_sees_the_conversation_up_to_it() -> None:
    opened = Opened({"sample": JUDGED})
    asyncio.run(record_a_call(opened.store, opened.info["id"]))
    said = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    asyncio.run(record_a_call(opened.store, opened.info["id"], "later", [*said, {"role": "user", "content": "More."}]))
    for target in ({"generation_id": "answer"}, {}):
        opened.service.request("POST", f"{opened.path}/reward", json={"judge": True, **target})
    first, last = opened.service.environments["math"].requests
    assert first.message_log == [said[0], {**said[1], "token_count": 2, "finish_reason": "stop"}]
    assert [message["content"] for message in last.message_log] == ["2 + 3?", "5", "More.", "5"]
    assert first.session_id != last.session_id


@pytest.mark.parametrize(
    ("sample", "generation_id", "status", "type_", "said"),
    [
        (None, None, 409, "session-not-judgeable", "opened without a sample"),
        ({"task_name": "chess"}, None, 409, "session-not-judgeable", "no task 'chess', only math, sliding_puzzle"),
        (JUDGED, "other", 404, "generation-unknown", "no such message"),
    ],
)
def test_what_no_environment_can_judge_is_refused(
    sample: dict[str, Any] | None, generation_id: str | None, status: int, type_: str, said: str
) -> None:
    target = {} if generation_id is None else {"generation_id": generation_id}
    opened, refused = judged(1.0, sample, **target)
    assert (refused.status_code, refused.json()["type"]) == (status, f"urn:rollout:problem:{type_}")
    assert said in refused.json()["errors"][0]["message"]
    assert opened.service.environments["math"].requests == []


def test_a_session_that_has_generated_nothing_is_not_judged() -> None:
    opened = Opened({"sample": JUDGED})
    refused = opened.service.request("POST", f"{opened.path}/reward", json={"judge": True})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:rollout:problem:session-not-judgeable")


@pytest.mark.parametrize(
    ("failure", "kind", "attempts"),
    [
        (EnvironmentRejected("extra_env_info.ground_truth is missing."), "environment", 1),
        (EnvironmentLost("The environment's replica died."), "environment", 3),
        (TurnTimedOut("The step took longer than 1 s."), "timeout", 3),
    ],
)
def test_a_judgement_that_fails_names_the_kind_and_leaves_no_reward(
    monkeypatch: pytest.MonkeyPatch, failure: RolloutFailure, kind: str, attempts: int
) -> None:
    monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(retries, "JITTER_S", 0.0)
    opened, failed = judged(failure)
    assert (failed.status_code, failed.json()["type"]) == (502, "urn:rollout:problem:judgement-failed")
    assert failed.json()["errors"] == [{"field": "judge", "message": str(failure).removesuffix("."), "value": kind}]
    assert len(opened.service.environments["math"].requests) == attempts
    [sample] = opened.get("/samples").json()["samples"]
    assert sample["rewards"] == {}


def test_samples_have_the_further_fields_of_the_sessions_sample() -> None:
    opened = Opened({"sample": {"task_name": "math", "further": 1}, "generation_index": 2})
    asyncio.run(record_a_call(opened.store, opened.info["id"]))
    [sample] = opened.get("/samples").json()["samples"]
    assert (sample["branch"], sample["further"], sample["message_log"][1]["token_ids"]) == ("answer", 1, [7, 8])


def test_samples_have_the_columns_that_their_session_includes() -> None:
    opened = Opened({"include": ["entropy"], "sampling": {"top_k": 5}})
    columns = {
        "entropy": packed_rows([0.5, 0.25], "float32"),
        "routed_experts": packed_rows(range(8), "uint8", [2, 1]),
    }
    asyncio.run(record_a_call(opened.store, opened.info["id"], columns=columns))
    [sample] = opened.get("/samples").json()["samples"]
    prompt, response = (message["routed_experts"] for message in sample["message_log"])
    assert prompt == {"dtype": "uint8", "shape": [3, 2, 1], "data": b64encode(bytes(range(6))).decode()}
    assert response == {"dtype": "uint8", "shape": [1, 2, 1], "data": b64encode(bytes(range(6, 8))).decode()}
    assert sample["message_log"][1]["entropy"] == columns["entropy"].model_dump()


async def record_a_call(
    store: SessionStore,
    session_id: str,
    name: str = "answer",
    messages: list[dict[str, Any]] | None = None,
    columns: Columns = NO_NUMBERS,
) -> None:
    messages = messages or [{"role": "user", "content": "2 + 3?"}]
    plan = await store.plan(session_id, f"call-{name}", messages, ChatContext())
    rendered = [RenderedMessage(messages[-1], packed_ids([1, 2]))]
    generated = GeneratedMessage(
        name,
        {"role": "assistant", "content": "5"},
        "5",
        packed_ids([7, 8]),
        packed_logprobs([-0.5, -0.25]),
        "stop",
        (WeightSpan("3", 0, 2),),
        columns=columns,
    )
    await store.add(session_id, EngineCall(f"call-{name}", ChatContext(), plan, rendered, packed_ids([3]), [generated]))


def test_a_session_that_was_ended_stays_readable() -> None:
    opened = Opened()
    ended = opened.service.request("DELETE", opened.path)
    assert (ended.status_code, ended.json()["status"]) == (200, "ended")
    assert opened.get().json()["status"] == "ended"


def test_an_unknown_session_is_a_404() -> None:
    opened = Opened()
    for path in ("", "/samples", "/drift"):
        refused = opened.service.request("GET", f"/v1/sessions/no-such{path}")
        assert (refused.status_code, refused.json()["type"]) == (404, "urn:rollout:problem:session-unknown")


def test_a_call_carries_what_its_session_demands_of_the_weights() -> None:
    opened = Opened({"policy": {"min_version": 0, "max_staleness": 1}})
    assert opened.call().status_code == 200
    [request] = opened.server.requests
    assert (request.min_weight_version, request.weight_version, request.max_staleness) == (0, None, 1)


def test_a_service_that_keeps_no_sessions_says_so() -> None:
    refused = ScriptedHttp(model_server=ScriptedModelServer()).request("POST", "/v1/sessions", json={})
    assert (refused.status_code, refused.json()["type"]) == (501, "urn:rollout:problem:sessions-not-configured")


def test_the_clients_session_is_open_inside_of_its_block() -> None:
    service = ScriptedHttp(
        model_server=ScriptedModelServer(), session_store=SessionStore(SessionsSettings(), ScriptedStorage())
    )

    async def play(client: AsyncRolloutClient) -> tuple[str, list[str]]:
        async with client.session(sampling={"temperature": 0.5}, deadline_s=60) as session:
            assert session.anthropic_base_url == f"http://service/v1/sessions/{session.id}"
            assert session.base_url == f"{session.anthropic_base_url}/v1"
            assert session.api_key.startswith("session-")
            assert (await session.reward({"style": 0.5})).status == "open"
            assert await session.samples() == []
            assert (await session.drift()).calls == 0
        return (await session.info()).status, [one.id for one in await client.sessions()]

    status, names = service.call(play)
    assert (status, len(names)) == ("ended", 1)

"""The routes of `/sessions`: their keys, what reaches the model server, and what can be read and rewarded."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from deployments.failures import EnvironmentLost, EnvironmentRejected, RolloutFailure, TurnTimedOut
from deployments.protocols.generation import IncludedColumns
from deployments.protocols.model_server import TOKEN_ENDPOINTS
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleInput, Sampling
from rollout_client.contract.sessions import SessionSample
from service.access.access_control import CHECK_PERIOD_S, OPEN_TO_ALL, AccessControl
from service.rollouts import retries
from tests.fakes.model_server import ScriptedModelServer
from tests.fakes.storage import ScriptedStorage
from tests.service.agents.agent_runs import record_call
from tests.service.keyed_http import access_of_a_key
from tests.service.scripted import outcome
from tests.service.scripted_http import ScriptedHttp

JSON = {"content-type": "application/json"}


class Opened:
    """A service with one session."""

    def __init__(
        self, request: dict[str, Any] | None = None, access: AccessControl = OPEN_TO_ALL, key: str = ""
    ) -> None:
        self.server = ScriptedModelServer()
        self.store = SessionStore(SessionsSettings(), ScriptedStorage())
        self.service = ScriptedHttp(access=access, model_server=self.server, session_store=self.store)
        self.judge = self.service.environments["math"]
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        opened = self.post("/v1/sessions", request or {})
        assert opened.status_code == 201, opened.text
        self.info = opened.json()
        self.path = f"/v1/sessions/{self.info['id']}"
        assert opened.headers["location"] == self.path

    def get(self, path: str = "") -> httpx.Response:
        return self.service.request("GET", self.path + path, headers=self.headers)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.service.request("POST", path, json=body, headers=self.headers)

    def reward(self, **fields: Any) -> httpx.Response:
        return self.post(f"{self.path}/reward", fields)

    def record(self, name: str = "answer", said: Sequence[str] = ("2 + 3?",)) -> None:
        """A call with these messages, whose answer is `5`."""
        messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
        asyncio.run(record_call(self.store, self.info["id"], messages, "5", name))

    def sample(self) -> dict[str, Any]:
        [sample] = self.get("/samples").json()["samples"]
        return cast("dict[str, Any]", sample)

    def call(
        self, endpoint: str = "chat/completions", key: str | None = None, content: bytes = b'{"n": 2}'
    ) -> httpx.Response:
        sent = {"authorization": f"Bearer {key or self.info['api_key']}"} | JSON
        below = "" if endpoint in TOKEN_ENDPOINTS else "/v1"
        return self.service.request("POST", f"{self.path}{below}/{endpoint}", content=content, headers=sent)


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:rollout:problem:")


def test_a_session_has_an_address_and_a_key_of_its_own() -> None:
    opened = Opened()
    assert (opened.info["base_url"], opened.info["status"]) == (f"http://service{opened.path}", "open")
    assert opened.info["api_key"].startswith("session-")
    assert "api_key" not in opened.get().json()
    assert [one["id"] for one in opened.service.request("GET", "/sessions").json()["sessions"]] == [opened.info["id"]]


@pytest.mark.parametrize("name", sorted(SessionSample.model_fields.keys() - SampleInput.model_fields.keys()))
def test_a_further_field_named_as_one_of_the_result_is_refused(name: str) -> None:
    refused = Opened().post("/v1/sessions", {"sample": {"task_name": "math", "level": 3, name: 42}})
    message = "this is a field of the result; give the further field another name"
    assert refused.status_code == 422
    assert refused.json()["errors"] == [{"field": f"sample.{name}", "message": message, "value": None}]


@pytest.mark.parametrize(
    "endpoint", ["chat/completions", "responses", "messages", "messages/count_tokens", "tokenize", *TOKEN_ENDPOINTS]
)
def test_a_call_reaches_the_model_server_as_one_of_the_session(endpoint: str) -> None:
    opened = Opened({"sampling": {"temperature": 0.5, "seed": 3}, "policy": {"min_version": 0}, "priority": "batch"})
    assert [opened.call(endpoint).json() for _ in range(2)] == [{"id": "a"}] * 2
    first, second = opened.server.requests
    assert (first.endpoint, first.body) == (endpoint, b'{"n": 2}')
    assert (first.session_id, first.rollout_id, first.share.id) == (opened.info["id"],) * 3
    assert (first.choices, first.share.weight) == (2 if endpoint == "chat/completions" else 1, 1 / 16)
    assert first.generation_id != second.generation_id
    assert (first.session_sampling or Sampling()).temperature == 0.5
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
    refused = opened.post("/v1/sessions", asked)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "include[0]")
    sample = {"task_name": "math", "messages": [{"role": "user", "content": "Q"}]}
    assert opened.service.post({"samples": [sample], **asked}).json()["errors"] == refused.json()["errors"]


def test_a_call_carries_what_its_session_includes_and_demands() -> None:
    demand = {"min_version": 0, "max_staleness": 1}
    opened = Opened({"include": ["top_logprobs:3", "entropy"], "sampling": {"top_k": 5}, "policy": demand})
    plain = Opened()
    assert (opened.call().status_code, plain.call().status_code) == (200, 200)
    [asked], [bare] = opened.server.requests, plain.server.requests
    assert (asked.include, bare.include) == (IncludedColumns(top_logprobs=3, entropy=True), IncludedColumns())
    assert (asked.min_weight_version, asked.weight_version, asked.max_staleness) == (0, None, 1)


def test_a_call_needs_the_key_of_its_session() -> None:
    opened = Opened()
    assert problem(opened.call(key="session-other")) == (401, "not-authenticated")
    assert opened.post(f"{opened.path}/v1/chat/completions", {}).status_code == 401
    assert opened.call("completions").status_code == 404, "a session has no text completions"
    assert opened.server.requests == []
    opened.headers = {"x-api-key": opened.info["api_key"]}
    assert opened.post(f"{opened.path}/v1/messages", {}).status_code == 200


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
    rewarded = opened.reward(reward=1.0)
    assert (rewarded.status_code, rewarded.json()["id"]) == (200, opened.info["id"])
    assert problem(opened.reward(reward=1.0, generation_id="x")) == (404, "generation-unknown")


JUDGED = {"task_name": "math", "idx": 4, "extra_env_info": {"ground_truth": "5"}}


def judged(reward: Any, sample: dict[str, Any] | None = JUDGED, **target: str) -> tuple[Opened, httpx.Response]:
    """A session with one call, and the answer to its judgement, which the environment `math` makes."""
    opened = Opened({} if sample is None else {"sample": sample})
    opened.record()
    opened.judge.script = [reward if isinstance(reward, Exception) else outcome(reward=reward)]
    return opened, opened.reward(judge=True, **target)


def test_the_environment_of_the_task_judges_the_last_branch() -> None:
    opened, answer = judged({"right": 1.0, "form": 0.5})
    assert (answer.status_code, answer.json()["id"]) == (200, opened.info["id"])
    [step] = opened.judge.requests
    assert step.message_log == [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "5", "token_count": 1, "finish_reason": "stop"},
    ]
    assert (step.extra_env_info, step.sample, step.is_start) == ({"ground_truth": "5"}, 4, False)
    sample = opened.sample()
    assert (sample["rewards"], sample["total_reward"]) == ({"right": 1.0, "form": 0.5}, 1.5)
    assert sample["message_log"][1]["reward"] is None


def test_a_judgement_of_a_message_is_its_reward_alone() -> None:
    opened, answer = judged(0.25, generation_id="answer")
    assert answer.status_code == 200
    assert (opened.sample()["rewards"], opened.sample()["message_log"][1]["reward"]) == ({"reward": 0.25}, 0.25)


def test_a_judgement_of_an_earlier_message_sees_the_conversation_up_to_it() -> None:
    opened = Opened({"sample": JUDGED})
    opened.record()
    opened.record("later", ["2 + 3?", "5", "More."])
    opened.reward(judge=True, generation_id="answer")
    opened.reward(judge=True)
    first, last = opened.judge.requests
    assert [message["content"] for message in first.message_log] == ["2 + 3?", "5"]
    assert [message["content"] for message in last.message_log] == ["2 + 3?", "5", "More.", "5"]
    assert first.session_id != last.session_id


@pytest.mark.parametrize(
    ("sample", "target", "refusal", "said"),
    [
        (None, {}, (409, "session-not-judgeable"), "opened without a sample"),
        ({"task_name": "chess"}, {}, (409, "session-not-judgeable"), "no task 'chess', only math, sliding_puzzle"),
        (JUDGED, {"generation_id": "other"}, (404, "generation-unknown"), "no such message"),
    ],
)
def test_what_no_environment_can_judge_is_refused(
    sample: dict[str, Any] | None, target: dict[str, str], refusal: tuple[int, str], said: str
) -> None:
    opened, refused = judged(1.0, sample, **target)
    assert problem(refused) == refusal
    assert said in refused.json()["errors"][0]["message"]
    assert opened.judge.requests == []


def test_a_session_that_has_generated_nothing_is_not_judged() -> None:
    assert problem(Opened({"sample": JUDGED}).reward(judge=True)) == (409, "session-not-judgeable")


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
    assert problem(failed) == (502, "judgement-failed")
    assert failed.json()["errors"] == [{"field": "judge", "message": str(failure).removesuffix("."), "value": kind}]
    assert (len(opened.judge.requests), opened.sample()["rewards"]) == (attempts, {})


def test_samples_have_the_further_fields_of_the_sessions_sample() -> None:
    opened = Opened({"sample": {"task_name": "math", "further": 1}, "generation_index": 2})
    opened.record()
    sample = opened.sample()
    assert (sample["branch"], sample["further"], sample["message_log"][1]["token_ids"]) == ("answer", 1, [53])


def test_an_unknown_session_is_a_404() -> None:
    for path in ("", "/samples", "/drift"):
        assert problem(Opened().service.request("GET", f"/v1/sessions/no-such{path}")) == (404, "session-unknown")


def test_a_service_that_keeps_no_sessions_says_so() -> None:
    refused = ScriptedHttp(model_server=ScriptedModelServer()).request("POST", "/v1/sessions", json={})
    assert problem(refused) == (501, "sessions-not-configured")


def test_the_clients_session_is_open_inside_of_its_block() -> None:
    async def play(client: AsyncRolloutClient) -> tuple[str, int]:
        async with client.sessions.open(sampling={"temperature": 0.5}, deadline_s=60) as session:
            assert session.anthropic_base_url == f"http://service/v1/sessions/{session.id}"
            assert session.base_url == f"{session.anthropic_base_url}/v1"
            assert session.api_key.startswith("session-")
            assert (await session.reward({"style": 0.5})).status == "open"
            assert await session.samples() == []
            assert (await session.drift()).calls == 0
        return (await session.info()).status, len(await client.sessions.all())

    assert Opened().service.call(play) == ("ended", 2)

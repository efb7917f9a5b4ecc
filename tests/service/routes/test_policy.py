"""The routes of `/policy` over a scripted store: what headers, queries and bodies say, and each refusal's document."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from deployments.failures import PolicyStoreLost
from deployments.policy.failures import (
    ChunkDamaged,
    ChunkMisplaced,
    PolicyFailure,
    PolicyNotCurrent,
    PolicyUnknown,
    SourceRefused,
    UpdateUnderWay,
    VersionRefused,
    VersionUnknown,
    WeightsRefused,
)
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.policy import PushOptions, SwitchOptions
from service.http.upload_chunk import FORWARDED_BYTES
from tests.fakes.policy_store import SENDER, UPDATE
from tests.service.scripted_http import SAMPLE, ScriptedHttp

UPDATE_JSON: dict[str, Any] = UPDATE.model_dump()
NEW_UPLOAD = {"version": 7, "received_bytes": 0, "expires_at": None}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def assert_problem(
    answer: httpx.Response, status: int, name: str, *errors: tuple[str, str, Any], title: str | None = None
) -> None:
    """`errors` are (field, message, value); every document has all of them."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    problem = answer.json()
    assert (problem["type"], problem["status"]) == (f"urn:rollout:problem:{name}", status)
    assert [(error["field"], error["message"], error["value"]) for error in problem["errors"]] == list(errors)
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert title in (None, problem["title"])


# Bodies


EVERY_OPTION = PushOptions(kind="delta", base=3, mode="abort", reset_prefix_cache=False, if_busy="refuse")


@pytest.mark.parametrize(
    ("query", "headers", "options", "is_zstd"),
    [
        ("", {}, PushOptions(), False),
        ("", {"content_encoding": "zstd"}, PushOptions(), True),
        ("", {"content_encoding": "identity"}, PushOptions(), False),
        ("", {"content_type": "application/vnd.safetensors"}, PushOptions(), False),
        ("", {"content_type": "application/octet-stream"}, PushOptions(), False),
        ("?kind=delta&base=3&mode=abort&reset_prefix_cache=false&if_busy=refuse", {}, EVERY_OPTION, False),
        ("?kind=adapter&name=run-b", {}, PushOptions(kind="adapter", name="run-b"), False),
    ],
)
def test_a_whole_file_is_forwarded_and_completed_as_query_and_headers_say(
    query: str, headers: dict[str, str], options: PushOptions, is_zstd: bool
) -> None:
    service = ScriptedHttp()
    answer = service.put_version(query=query, **headers)
    assert (answer.status_code, answer.json(), answer.headers["content-type"]) == (200, UPDATE_JSON, "application/json")
    assert service.store.calls == [
        ("repeated_update", 7, None, options.name),
        ("write_chunk", 7, 0, 7, options.name),
        ("complete_upload", 7, SENDER, options, is_zstd, None),
    ]
    assert service.store.arrived == b"weights"


def test_a_large_body_is_forwarded_as_it_arrives() -> None:
    service = ScriptedHttp()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * (FORWARDED_BYTES // 2)

    assert service.put_version(chunks()).status_code == 200
    assert service.store.named("write_chunk") == [
        (7, 0, FORWARDED_BYTES, None),
        (7, FORWARDED_BYTES, FORWARDED_BYTES, None),
        (7, 2 * FORWARDED_BYTES, FORWARDED_BYTES // 2, None),
    ]


@pytest.mark.parametrize(
    ("content_range", "answered"),
    [
        ("bytes 0-6/9", (202, {**NEW_UPLOAD, "received_bytes": 7})),
        ("bytes 0-6/*", (202, {**NEW_UPLOAD, "received_bytes": 7})),
        ("bytes 0-6/7", (200, UPDATE_JSON)),
    ],
)
def test_an_upload_is_complete_when_all_has_arrived(content_range: str, answered: tuple[int, Any]) -> None:
    service = ScriptedHttp()
    answer = service.put_version(b"weights", content_range=content_range)
    assert (answer.status_code, answer.json()) == answered
    assert len(service.store.named("complete_upload")) == (answer.status_code == 200)


INVALID, UNREADABLE = (422, "invalid-request"), (400, "unreadable-body")
TOO_LARGE, UNSUPPORTED = (413, "body-too-large"), (415, "unsupported-media-type")


NO_RANGES = (
    *("bytes */7", "bytes 0-6", "items 0-6/7", "bytes=0-6/7", "bytes 0-6/x", "0-6/7", "bytes 0-6/" + "9" * 5000),
    *("bytes 6-0/7", "bytes 0-6/6", "bytes 9-9/9"),
)


@pytest.mark.parametrize(
    ("options", "refused", "field"),
    [
        *(({"content_range": given}, UNREADABLE, "body") for given in NO_RANGES),
        ({"content_length": str(2**28 + 1)}, TOO_LARGE, "body"),
        ({"content_encoding": "gzip"}, UNSUPPORTED, "content-encoding"),
        ({"content_type": "text/plain"}, UNSUPPORTED, "content-type"),
        ({"content_type": "application/jsonx"}, UNSUPPORTED, "content-type"),
        *(
            ({"query": f"?{query}"}, INVALID, f"query.{query.partition('=')[0]}")
            for query in ("kind=half", "base=-1", "mode=stop", "if_busy=fail", "reset_prefix_cache=maybe", "pause=keep")
        ),
        *(({"version": version}, INVALID, "path.version") for version in ("0", str(2**63), "latest")),
        *(
            ({"content": content, "content_type": "application/json"}, refused, field)
            for content, refused, field in (
                ("{}", INVALID, "checkpoint"),
                ('{"checkpoint": 1}', INVALID, "checkpoint"),
                ('{"checkpoint": "a", "root": "b"}', INVALID, "root"),
                (" " * (2**20 + 1), TOO_LARGE, "body"),
                ("{", UNREADABLE, "body"),
            )
        ),
        *(
            ({"query": f"?kind=adapter&name={name}"}, INVALID, "query.name")
            for name in ("7", "-a", "a/b", "a" * 65, "")
        ),
        ({"query": "?name=run-b"}, INVALID, ANY),
    ],
)
def test_a_push_that_cannot_be_understood_never_calls_the_store(
    options: dict[str, Any], refused: tuple[int, str], field: str
) -> None:
    service = ScriptedHttp()
    assert_problem(service.put_version(**options), *refused, (field, ANY, ANY))
    assert service.store.calls == []


# Digests


def test_a_chunk_goes_on_and_the_last_one_names_the_digest() -> None:
    service, digest = ScriptedHttp(), sha256(b"weights")
    service.store.arrived += b"weig"
    assert service.put_version(b"hts", content_range="bytes 4-6/7", weights_digest=digest).status_code == 200
    assert (service.store.named("write_chunk"), bytes(service.store.arrived)) == ([(7, 4, 3, None)], b"weights")
    assert service.store.named("repeated_update") == [(7, digest, None)]
    assert service.store.named("complete_upload") == [(7, SENDER, PushOptions(), False, digest)]


def test_a_push_of_the_current_weights_is_answered_unread() -> None:
    service = ScriptedHttp()
    service.store.repeated = UPDATE
    answer = service.put_version(weights_digest=sha256(b"weights"))
    assert (answer.status_code, answer.json()) == (200, UPDATE_JSON)
    assert service.store.calls == [("repeated_update", 7, sha256(b"weights"), None)]


# Checkpoints


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_a_checkpoint_is_named_by_a_json_body(content_type: str) -> None:
    service = ScriptedHttp()
    answer = service.put_version('{"checkpoint": "/roots/a"}', query="?mode=wait", content_type=content_type)
    assert (answer.status_code, answer.json()) == (200, UPDATE_JSON)
    assert service.store.calls == [("load_checkpoint", 7, "/roots/a", PushOptions(mode="wait"))]


def test_a_rollback_names_the_version_and_the_options() -> None:
    service = ScriptedHttp()
    for path in ("/policy/rollback", "/v1/policy/rollback"):
        answer = service.request("POST", f"{path}?mode=wait", content='{"to": 5}')
        assert (answer.status_code, answer.json()) == (200, UPDATE_JSON)
    service.request("POST", "/policy/rollback", content='{"to": 0, "version": 9}')
    service.request("POST", "/policy/rollback", content='{"to": 5, "name": "again"}')
    assert service.store.named("roll_back") == [
        (5, None, SwitchOptions(mode="wait"), None),
        (5, None, SwitchOptions(mode="wait"), None),
        (0, 9, SwitchOptions(), None),
        (5, None, SwitchOptions(), "again"),
    ]


# What the store refuses


PUSH = ("PUT", "/policy/versions/7", {"content": b"weights"})
LOAD = ("PUT", "/policy/versions/7", {"json": {"checkpoint": "/etc"}})
ROLL_BACK = ("POST", "/policy/rollback", {"content": '{"to": 5}'})
DROP = ("DELETE", "/policy/names/b", {"json": None})
PLAY = ("POST", "/rollout", {"json": {"samples": [SAMPLE], "policy": {"name": "b", "version": 9}}})
CALL = ("POST", "/v1/completions?version=3", {"json": {"prompt": "Hi"}})
SCORE = ("POST", "/score", {"json": {"sequences": [[1, 2]], "policy": {"name": "b"}}})


@pytest.mark.parametrize(
    ("method", "failure", "status", "name", "sent"),
    [
        ("write_chunk", VersionRefused, 409, "version-refused", PUSH),
        ("write_chunk", ChunkMisplaced, 409, "chunk-misplaced", PUSH),
        ("write_chunk", ChunkDamaged, 400, "chunk-damaged", PUSH),
        ("repeated_update", WeightsRefused, 422, "weights-refused", PUSH),
        ("complete_upload", WeightsRefused, 422, "weights-refused", PUSH),
        ("complete_upload", VersionUnknown, 404, "version-unknown", PUSH),
        ("complete_upload", UpdateUnderWay, 409, "update-under-way", PUSH),
        ("load_checkpoint", SourceRefused, 422, "source-refused", LOAD),
        ("roll_back", VersionUnknown, 404, "version-unknown", ROLL_BACK),
        ("upload_state", VersionUnknown, 404, "version-unknown", ("GET", "/policy/versions/7/upload", {})),
        ("wait_for", PolicyNotCurrent, 409, "policy-not-current", ("GET", "/policy?min_version=4", {})),
        ("drop_policy", PolicyUnknown, 404, "policy-unknown", DROP),
        ("wait_for", PolicyUnknown, 404, "policy-unknown", PLAY),
        ("wait_for", PolicyUnknown, 404, "policy-unknown", SCORE),
        ("wait_for", PolicyNotCurrent, 409, "policy-not-current", PLAY),
        ("wait_for", PolicyNotCurrent, 409, "policy-not-current", CALL),
    ],
)
def test_what_the_store_refuses_becomes_a_problem_with_its_fields(
    method: str, failure: type[PolicyFailure], status: int, name: str, sent: tuple[str, str, dict[str, Any]]
) -> None:
    service = ScriptedHttp()
    errors = ("a.weight", "is wrong", 7), ("b.weight", "is too", None)
    service.store.failures[method] = failure(
        *(FieldProblem(field=field, message=message, value=value) for field, message, value in errors)
    )
    verb, path, options = sent
    answer = service.request(verb, path, **options)
    assert_problem(answer, status, name, *errors, title=failure.title)
    assert answer.json()["detail"] == "a.weight: is wrong. b.weight: is too."
    assert not service.has_started_something


def test_a_lost_store_is_503_with_retry_after() -> None:
    service = ScriptedHttp()
    service.store.failures["write_chunk"] = PolicyStoreLost("The policy store died during the call.")
    answer = service.put_version()
    assert_problem(answer, 503, "not-ready", ("", "The policy store died during the call", None))
    assert answer.headers["retry-after"] == "2"


# Questions


def test_the_state_of_an_upload_is_returned() -> None:
    service = ScriptedHttp()
    answer = service.request("GET", "/policy/versions/7/upload")
    assert (answer.status_code, answer.json()) == (200, NEW_UPLOAD)
    assert service.request("GET", "/policy/versions/7/upload?name=run-b").status_code == 200
    assert service.store.named("upload_state") == [(7, None), (7, "run-b")]


def test_the_state_and_the_layout_are_returned() -> None:
    service = ScriptedHttp()
    answer = service.request("GET", "/policy")
    assert (answer.status_code, answer.json()["current"], service.store.calls) == (200, 3, [("state", 0.0)])
    # Nobody knows when the model's own checkpoint was made.
    assert [version["created_at"] for version in answer.json()["versions"]] == [None]
    service.request("GET", "/policy?checksums_within_s=2.5")
    assert service.store.named("state") == [(0.0,), (2.5,)]
    layout = service.request("GET", "/policy/layout")
    assert layout.json() == {"tensors": {"w": {"dtype": "BF16", "shape": [2, 3]}}, "draft": {}, "max_lora_rank": None}


def test_the_state_is_returned_once_a_version_is_current() -> None:
    service = ScriptedHttp()
    assert service.request("GET", "/policy?min_version=3&wait_s=1.5").status_code == 200
    assert service.request("GET", "/policy?min_version=3").status_code == 200
    assert service.store.named("wait_for") == [(None, 3, None, 1.5), (None, 3, None, 0.0)]


# Named policies


def test_a_named_policy_is_dropped() -> None:
    service = ScriptedHttp()
    assert service.request("DELETE", "/v1/policy/names/run-b").status_code == 204
    assert service.store.named("drop_policy") == [("run-b",)]

"""Bad requests through the whole HTTP application: a problem document names the field, and nothing is started."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from service.rollout_records.trainer_reports import TrainerReports
from service.settings import RequestLimits
from tests.fakes.model_server import ScriptedModelServer
from tests.service.scripted_http import SAMPLE as GOOD
from tests.service.scripted_http import VOCAB_SIZE, ScriptedHttp

RANGE = {"task_name": "math", "count": 4}
LOG = [{"role": "user", "content": "a", "token_ids": [64]}]
TOOL = {"type": "function"}
REPORT = {"rollout_id": "r", "logprobs": [-1]}
OTHER_SPAN = {"version": "step-1", "start": 0, "end": 1}
ITSELF = "the service sets this argument itself"


def asked(**fields: Any) -> dict[str, Any]:
    return {"samples": [GOOD], **fields}


def sampling(**options: Any) -> dict[str, Any]:
    return asked(sampling=options)


def sampled(**fields: Any) -> dict[str, Any]:
    """A request whose one sample has these fields."""
    return {"samples": [{**GOOD, **fields}]}


def ranged(**fields: Any) -> dict[str, Any]:
    return {"samples_from": [{**RANGE, **fields}]}


def logged(**fields: Any) -> dict[str, Any]:
    """A request whose one message has these fields."""
    return {"samples": [{"task_name": "math", "message_log": [{**LOG[0], **fields}]}]}


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"samples": []}, "body", "samples and samples_from are both missing"),
        (asked(samples_from=[RANGE]), "body", "samples and samples_from are both given"),
        (ranged(count=0), "samples_from[0].count", "greater than or equal to 1"),
        (ranged(start=-1), "samples_from[0].start", "greater than or equal to 0"),
        (ranged(begin=1), "samples_from[0].begin", "not known"),
        ({"samples_from": [RANGE, {**RANGE, "task_name": "chess"}]}, "samples_from[1].task_name", "known ones are"),
        ({"samples_from": [RANGE] * 26}, "samples_from", "104 samples x 1 generations is more than 100 rollouts"),
        (ranged(split="eval"), "samples_from[0].split", "task 'math' has no data"),
        (sampled(task_name="chess"), "samples[0].task_name", "known ones are math, sliding_puzzle"),
        ({"samples": [GOOD, {**GOOD, "message_log": LOG}]}, "samples[1]", "messages and message_log are both given"),
        ({"samples": [{"task_name": "math"}]}, "samples[0]", "messages and message_log are both missing"),
        (sampled(messages=[]), "samples[0].messages", "at least 1 item"),
        (logged(token_ids=[64, VOCAB_SIZE]), "samples[0].message_log[0].token_ids[1]", "262 is not a token of"),
        (logged(token_ids=[-1]), "samples[0].message_log[0].token_ids[0]", "greater than or equal to 0"),
        ({"samples": [{**GOOD, "reward": 1}, {**GOOD, "status": 1}]}, "samples[1].status", "field of the result"),
        (sampling(temperature=-0.1), "sampling.temperature", "greater than or equal to 0"),
        (sampling(temperature=2.5), "sampling.temperature", "less than or equal to 2"),
        (sampling(temperature=1e-3), "sampling.temperature", "at least 0.01"),
        (asked(priority="urgent"), "priority", "'batch' or a number from 0.001 to 1000"),
        (asked(priority=0), "priority", "a number from 0.001 to 1000"),
        (sampling(top_p=0), "sampling.top_p", "greater than 0"),
        (sampling(top_p=1.5), "sampling.top_p", "less than or equal to 1"),
        (sampling(top_k=2**64), "sampling.top_k", "less than"),
        (sampling(seed="5"), "sampling.seed", "valid integer"),
        (logged(token_ids=[]), "samples[0].message_log", "it has no token"),
        (logged(generation_logprobs=[-1.0, -2.0]), "samples[0].message_log[0]", "2 generation_logprobs for 1 token"),
        (logged(token_id=1), "samples[0].message_log[0].token_id", "not known"),
        (logged(weight_versions=[OTHER_SPAN]), "samples[0].message_log[0].weight_versions[0].version", "match pattern"),
        (asked(keep={"per_group": 2}), "keep.per_group", "only 1 rollouts; keep fewer or raise"),
        (asked(keep={"groups": 2}), "keep.groups", "only 1 groups"),
        (sampled(chat_template_kwargs={"chat_template": "x"}), "samples[0].chat_template_kwargs.chat_template", ITSELF),
        (asked(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize", ITSELF),
        (asked(deadline_s=0), "deadline_s", "greater than 0"),
        (asked(schedule="sync"), "schedule", "'async' or 'lockstep'"),
        (sampling(top_k=-2), "sampling.top_k", "greater than or equal to -1"),
        (sampling(max_new_tokens=0), "sampling.max_new_tokens", "greater than or equal to 1"),
        (sampling(stop_strings=[""]), "sampling.stop_strings[0]", "at least 1 character"),
        (sampling(temprature=1), "sampling.temprature", "not known"),
        (asked(num_generation=4), "num_generation", "not known"),
        (asked(num_generations=0), "num_generations", "greater than or equal to 1"),
        (asked(num_generations=101), "samples", "more than 100 rollouts"),
        (asked(num_generations="4"), "num_generations", "valid integer"),
        (asked(max_seq_len=101), "max_seq_len", "at most 100 tokens"),
        (asked(max_rollout_turns=0), "max_rollout_turns", "greater than or equal to 1"),
        (sampling(stop_strings=["."] * 129), "sampling.stop_strings", "at most 128 items"),
        (sampled(stop_strings=["."] * 129), "samples[0].stop_strings", "at most 128 items"),
        (sampled(stop_strings=["." * 1025]), "samples[0].stop_strings[0]", "at most 1024 characters"),
        (sampled(tools=[TOOL] * 129), "samples[0].tools", "at most 128 items"),
        (asked(policy={"min_version": -1}), "policy.min_version", "greater than or equal to 0"),
        (asked(policy={"min_version": "3"}), "policy.min_version", "valid integer"),
        (asked(policy={"version": 1.5}), "policy.version", "valid integer"),
        (asked(policy={"wait_s": -0.5}), "policy.wait_s", "greater than or equal to 0"),
        (asked(policy={"newest": 3}), "policy.newest", "not known"),
        (asked(policy=3), "policy", "should be an object"),
    ],
)
def test_an_invalid_request_names_its_field_and_starts_nothing(body: dict[str, Any], field: str, says: str) -> None:
    service = ScriptedHttp()
    response = service.post(body)
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
    problem = response.json()
    assert [error["field"] for error in problem["errors"]] == [field]
    assert says in problem["errors"][0]["message"]
    assert field in problem["detail"]
    assert (service.store.calls, service.has_started_something) == ([], False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rollout", '{"samples": '),
        ("/rollout", "not json"),
        *(
            (path, body % number)
            for number in ("NaN", "Infinity", "-Infinity")
            for path, body in (
                ("/rollout", '{"samples": [{"note": [1.0, %s]}]}'),
                ("/rollout", '{"sampling": {"temperature": %s}}'),
                ("/score", '{"sequences": [[5, %s]]}'),
                ("/replay", '{"rollout_id": "a", "rollout": {"total_reward": %s}}'),
                ("/rollouts/logprobs", '{"reports": [{"rollout_id": "a", "logprobs": [%s]}]}'),
            )
        ),
    ],
)
def test_an_unreadable_body_is_refused_and_starts_nothing(path: str, body: str) -> None:
    unused: Any = None
    service = ScriptedHttp(reports=TrainerReports(unused, unused, lambda: {}))
    response = service.request("POST", path, content=body)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/problem+json")
    [error] = response.json()["errors"]
    assert (error["field"], error["message"].partition(":")[0]) == ("body", "Invalid JSON")
    assert not service.has_started_something


@pytest.mark.parametrize(
    ("name", "says"), [("extra_env_info", "Input should be a finite number"), ("level", "it holds a number")]
)
@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_that_would_come_back_as_null_is_refused(name: str, says: str, number: str) -> None:
    service = ScriptedHttp()
    response = service.post(json.dumps({"samples": [GOOD, {**GOOD, name: {"a": [1.0, "x"]}}]}).replace('"x"', number))
    [error] = response.json()["errors"]
    assert (response.status_code, error["field"].startswith(f"samples[1].{name}")) == (422, True)
    assert error["message"].startswith(says)
    assert not service.has_started_something


@pytest.mark.parametrize(
    ("call", "body", "field", "says"),
    [
        ("GET /tasks/math/samples?count=0", None, "query.count", "greater than or equal to 1"),
        ("GET /tasks/math/samples?count=10001", None, "query.count", "less than or equal to 10000"),
        ("GET /tasks/math/samples?seed=-1", None, "query.seed", "greater than or equal to 0"),
        ("GET /tasks/math/samples?start=-1", None, "query.start", "greater than or equal to 0"),
        ("GET /tasks/math/samples?split=eval", None, "query.split", "task 'math' has no data"),
        ("GET /policy?min_version=-1", None, "query.min_version", "greater than or equal to 0"),
        ("GET /policy?wait_s=-1", None, "query.wait_s", "greater than or equal to 0"),
        ("GET /policy?wait_s=nan", None, "query.wait_s", "greater than or equal to 0"),
        ("POST /policy/rollback", {"to": "5"}, "to", "valid integer"),
        ("POST /policy/rollback", {"to": True}, "to", "valid integer"),
        ("POST /policy/rollback", {"to": 5, "version": "9"}, "version", "valid integer"),
        ("POST /policy/rollback?kind=delta", {"to": 5}, "query.kind", "not known"),
        ("POST /policy/rollback?base=3", {"to": 5}, "query.base", "not known"),
        ("POST /generate", {"weight_version": {"min_version": -1}}, "weight_version.min_version", ""),
        ("POST /generate", {"weight_version": {"newest": 1}}, "weight_version.newest", ""),
        ("POST /generate", {"weight_version": 3}, "weight_version", ""),
        ("POST /generate", {"lora_path": "../x"}, "lora_path", ""),
        ("POST /generate", {"lora_path": ["run-b"]}, "lora_path", ""),
        ("POST /generate?version=3", {"weight_version": {"exact_version": 4}}, "weight_version", ""),
        ("POST /generate?policy=run-a", {"lora_path": "run-b"}, "lora_path", ""),
        ("POST /rollouts/logprobs", {"reports": []}, "reports", "at least 1 item"),
        ("POST /rollouts/logprobs", {"reports": [{**REPORT, "logprobs": ["x"]}]}, "reports[0].logprobs[0]", ""),
        ("POST /rollouts/logprobs", {"reports": [{**REPORT, "start": "1"}]}, "reports[0].start", "valid integer"),
        ("POST /rollouts/logprobs", {"reports": [{**REPORT, "token_ids": [2**70]}]}, "reports", ""),
        ("POST /score", {"sequences": []}, "sequences", "at least 1 item"),
        ("POST /score", {"sequences": [[1]]}, "sequences[0]", "at least 2 items"),
        ("POST /score", {"sequences": [[1, 2], [2, -1]]}, "sequences[1][1]", "greater than or equal to 0"),
        ("POST /score", {"sequences": [["a"] * 9]}, "sequences[0][0]", "valid integer"),
        ("POST /score", {"sequences": [[1, 2]] * 101}, "sequences", "101 sequences are more than 100"),
        ("POST /score", {"sequences": [[1, 2], [1] * 101]}, "sequences[1]", "101 tokens; the model takes at most 100"),
        ("POST /score", {"sequences": [[1] * 100], "top_k": 1}, "sequences[0]", "takes at most 99 with top_k"),
        ("POST /score", {"sequences": [[1, VOCAB_SIZE]]}, "sequences[0][1]", "262 is not a token of the model"),
        (
            "POST /score",
            {"sequences": [[1, 2]], "start": 2},
            "start",
            "sequences[0] has 2 tokens; its last position is 1",
        ),
        ("POST /score", {"sequences": [[1, 2], [2, 3]], "start": [0]}, "start", "it has 1 positions for 2 sequences"),
        ("POST /score", {"sequences": [[1, 2]], "top_k": 21}, "top_k", "less than or equal to 20"),
        ("POST /score", {"sequences": [[1, 2]], "temperature": 1}, "temperature", "not known"),
    ],
)
def test_an_invalid_request_of_another_route_names_its_field_too(call: str, body: Any, field: str, says: str) -> None:
    unused: Any = None
    server = ScriptedModelServer()
    service = ScriptedHttp(model_server=server, reports=TrainerReports(unused, unused, lambda: {}))
    method, path = call.split(" ")
    refused = service.request(method, path, json=body)
    [error] = refused.json()["errors"]
    assert (refused.status_code, error["field"]) == (422, field)
    assert says in error["message"]
    assert (server.requests, service.store.calls, service.has_started_something) == ([], [], False)


async def chunks_of_5000_bytes() -> AsyncIterator[bytes]:
    for _ in range(5):
        yield b" " * 1000


@pytest.mark.parametrize("content", [b" " * 5000, chunks_of_5000_bytes()], ids=["with", "without"])
def test_a_body_over_the_limit_is_refused(content: Any) -> None:
    service = ScriptedHttp()
    response = service.request("POST", "/rollout", content=content)
    assert (response.status_code, response.json()["type"]) == (413, "urn:rollout:problem:body-too-large")
    message = "it is larger than the limit of 4096 bytes; split the request"
    assert response.json()["errors"] == [{"field": "body", "message": message, "value": None}]
    assert not service.has_started_something


@pytest.mark.parametrize(
    ("header", "value", "supported"),
    [
        ("content-type", "text/plain", "application/json"),
        ("content-type", "application/vnd.apache.arrow.stream", "application/json"),
        ("content-encoding", "br", "gzip or zstd or the body without an encoding"),
        ("content-encoding", "gzip, zstd", "gzip or zstd or the body without an encoding"),
    ],
)
def test_another_type_or_encoding_is_refused_with_the_supported(header: str, value: str, supported: str) -> None:
    service = ScriptedHttp()
    message = f"{value!r} is not supported; send {supported}"
    for path in ("/rollout", "/policy/rollback", "/v1/responses"):
        response = service.request("POST", path, content=json.dumps({"samples": [GOOD]}), headers={header: value})
        assert response.status_code == 415
        assert response.json()["errors"] == [{"field": header, "message": message, "value": value}]
    assert (service.store.calls, service.has_started_something) == ([], False)


@pytest.mark.parametrize(
    "content_type", [None, "application/json", "Application/JSON; charset=utf-8", "application/x-www-form-urlencoded"]
)
def test_json_may_come_without_a_type_and_with_the_one_that_curl_sends(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps({"samples": [GOOD]})
    assert ScriptedHttp().request("POST", "/rollout", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/jobs", "DELETE, GET, POST"), ("/jobs/some", "DELETE, GET"), ("/v1/rollout", "POST")]
)
def test_a_wrong_method_is_told_all_methods_of_its_path(path: str, methods: str) -> None:
    refused = ScriptedHttp().request("PATCH", path)
    assert (refused.status_code, refused.headers["allow"]) == (405, methods)


def test_many_mistakes_are_named_up_to_a_number() -> None:
    errors = ScriptedHttp().post({"samples": [{**GOOD, "idx": "1"}] * 21}).json()["errors"]
    assert [error["field"] for error in errors] == [f"samples[{place}].idx" for place in range(20)]
    errors = ScriptedHttp().post({"samples": [{**GOOD, "task_name": "chess"}] * 21}).json()["errors"]
    assert [error["field"] for error in errors] == [f"samples[{place}].task_name" for place in range(20)]


def test_stop_strings_and_tools_may_be_as_many_as_the_bounds_say() -> None:
    sample = {**GOOD, "stop_strings": ["." * 1024, *["."] * 127], "tools": [TOOL] * 128}
    assert ScriptedHttp(RequestLimits(max_body_bytes=2**16)).post({"samples": [sample]}).status_code == 200


def test_the_files_of_images_are_not_among_what_the_results_repeat() -> None:
    picture = f"data:image/png;base64,{'A' * 2000}"
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}]}]
    body = json.dumps({"samples": [{"task_name": GOOD["task_name"], "messages": messages}], "num_generations": 3})
    repeated = len(body) - len(picture)
    for limit, field in (
        (3 * repeated - 1, "num_generations"),
        (3 * repeated, "samples[0].messages[0].content[0].image"),
    ):
        service = ScriptedHttp(RequestLimits(max_echoed_bytes_per_request=limit))
        assert [error["field"] for error in service.post(body).json()["errors"]] == [field]
        assert not service.has_started_something


def test_what_the_results_repeat_of_a_request_is_bounded() -> None:
    body = json.dumps({"samples": [GOOD], "num_generations": 3})
    assert ScriptedHttp(RequestLimits(max_echoed_bytes_per_request=3 * len(body))).post(body).status_code == 200
    service = ScriptedHttp(RequestLimits(max_echoed_bytes_per_request=3 * len(body) - 1))
    message = (
        f"the results of 3 generations repeat a body of {len(body)} bytes, and may repeat {3 * len(body) - 1} bytes; "
        "ask for fewer generations or send less with each sample"
    )
    response = service.post(body)
    assert response.status_code == 422
    assert response.json()["errors"] == [{"field": "num_generations", "message": message, "value": 3}]
    assert not service.has_started_something


@pytest.mark.parametrize("length", ["abc", "1e3", "-1", "1_0", "\xb2", "9" * 5000])
@pytest.mark.parametrize("path", ["/rollout", "/score", "/policy/rollback"])
def test_a_content_length_that_is_no_number_is_an_unreadable_body(path: str, length: str) -> None:
    headers = [(b"content-length", length.encode("latin-1"))]
    response = ScriptedHttp().request("POST", path, content=b"{}", headers=headers)
    assert response.status_code == 400
    assert response.json()["errors"][0]["message"].endswith("is not a number of bytes")


def test_a_client_that_goes_away_before_its_body_has_arrived_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    service = ScriptedHttp()
    coming: list[Message] = [
        {"type": "http.request", "body": b'{"samples"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/rollout", "headers": [], "query_string": b""}
    asyncio.run(service.app(scope, receive, send))
    assert (sent[0]["status"], sent[1]["body"]) == (499, b"")
    assert (caplog.records, service.has_started_something) == ([], False)

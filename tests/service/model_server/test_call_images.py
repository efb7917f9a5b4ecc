"""Images of calls reach replicas by their names, or the call is refused and nothing is kept."""

import asyncio
import json
from base64 import b64encode
from typing import Any

import pytest

from deployments.images.book import NOT_KEPT, ImagesSettings
from deployments.protocols.images import name_of_image
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from service.images.request_images import NOT_TAKEN, RequestImages
from service.model_server.call_images import _NO_SOURCE, _NOT_SHOWN, _images_of
from service.settings import RequestLimits
from tests.deployments.images.pictures import picture
from tests.fakes.image_store import ImagesInProcess
from tests.fakes.model_server import ScriptedModelServer
from tests.fakes.storage import ScriptedStorage
from tests.service.scripted_http import ScriptedHttp

RED, BLUE = picture("red"), picture("blue", "JPEG")
RED_NAME, BLUE_NAME = name_of_image(RED), name_of_image(BLUE)
RED_DATA = b64encode(RED).decode()
RED_URL = f"data:image/png;base64,{RED_DATA}"
BLUE_URL = f"data:image/jpeg;base64,{b64encode(BLUE).decode()}"
TEXT = {"type": "text", "text": "Look"}
LIMITS = RequestLimits(max_body_bytes=2**20, max_rollouts_per_request=100)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def openai(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def anthropic(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def responses(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


BASE64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED_DATA}}
CHAT, FIRST = "chat/completions", "messages[0].content[0]"


class Service:
    """Routes of calls, of a session and outside of one, over images in this process."""

    def __init__(self, takes_images: bool = True, model_sees: bool = True, **settings: Any) -> None:
        self.server = ScriptedModelServer()
        given = ImagesSettings(**settings)
        self.kept = ImagesInProcess(given)
        images = RequestImages(self.kept, given, takes_images=model_sees) if takes_images else None
        self.sessions = SessionStore(SessionsSettings(), ScriptedStorage())
        self.http = ScriptedHttp(LIMITS, model_server=self.server, session_store=self.sessions, images=images)

    def call(self, endpoint: str, body: Any, in_session: bool = True) -> Any:
        path, headers = "/v1", {}
        if in_session:
            opened = self.http.request("POST", "/v1/sessions", json={}).json()
            path, headers = f"/v1/sessions/{opened['id']}/v1", {"authorization": f"Bearer {opened['api_key']}"}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers["content-type"] = "application/json"
        return self.http.request("POST", f"{path}/{endpoint}", content=content, headers=headers)

    @property
    def sent(self) -> Any:
        return json.loads(self.server.requests[-1].body)


@pytest.mark.parametrize(
    ("endpoint", "given", "sent"),
    [
        (
            "chat/completions",
            {"messages": [user(TEXT, openai(RED_URL), {"type": "image", "image": BLUE_URL})]},
            {"messages": [user(TEXT, openai(RED_NAME), openai(BLUE_NAME))]},
        ),
        (
            "chat/completions",
            {"messages": [user({"image_url": RED_URL, "uuid": "mine"}), {"role": "assistant", "content": "A"}]},
            {"messages": [user(openai(RED_NAME)), {"role": "assistant", "content": "A"}]},
        ),
        ("tokenize", {"messages": [user(openai(RED_URL))]}, {"messages": [user(openai(RED_NAME))]}),
        (
            "responses",
            {"input": [user({"type": "input_image", "image_url": RED_URL}), {"type": "function_call_output"}]},
            {"input": [user(responses(RED_NAME)), {"type": "function_call_output"}]},
        ),
        (
            "messages",
            {"messages": [user(BASE64, TEXT), user({"type": "tool_result", "content": [TEXT, BASE64]})]},
            {
                "messages": [
                    user(anthropic(RED_NAME), TEXT),
                    user({"type": "tool_result", "content": [TEXT, anthropic(RED_NAME)]}),
                ]
            },
        ),
        ("messages/count_tokens", {"messages": [user(BASE64)]}, {"messages": [user(anthropic(RED_NAME))]}),
    ],
)
@pytest.mark.parametrize("in_session", [True, False])
def test_a_replica_gets_the_names_of_images(endpoint: str, given: Any, sent: Any, in_session: bool) -> None:
    service = Service()
    assert service.call(endpoint, given, in_session).status_code == 200
    assert service.sent == sent


def test_a_call_without_images_is_passed_on_byte_for_byte() -> None:
    service = Service()
    body = b'{ "messages": [{"role": "user", "content": "an \\u0069mage_url"}],  "n": 1}'
    assert service.call("chat/completions", body).status_code == 200
    assert service.server.requests[0].body == body


def test_an_image_spelled_in_escapes_is_checked_too() -> None:
    body = json.dumps({"messages": [user(openai(f"sha256:{'0' * 64}"))]})
    for content in (body.replace("image", "\\u0069mage").encode(), body.encode("utf-16")):
        service = Service()
        refused = service.call(CHAT, content)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, FIRST)
        assert not service.server.requests


@pytest.mark.parametrize(
    ("endpoint", "body", "field", "message"),
    [
        (CHAT, {"messages": [user(TEXT, openai("data:image/png;base64,%%%"))]}, "messages[0].content[1]", "not base64"),
        (CHAT, {"messages": [user(openai(f"sha256:{'0' * 64}"))]}, FIRST, NOT_KEPT),
        (CHAT, {"messages": [user(openai("https://example.org/a.png"))]}, FIRST, _NO_SOURCE),
        (CHAT, {"messages": [user(openai("file:///a.png"))]}, FIRST, _NO_SOURCE),
        (CHAT, {"messages": [user({"type": "text", "text": "Look", "image_url": RED_URL})]}, FIRST, _NO_SOURCE),
        (CHAT, {"messages": [{"role": "assistant", "content": [openai(RED_URL)]}]}, FIRST, _NOT_SHOWN),
        (CHAT, {"messages": [{"role": "tool", "content": [openai(RED_URL)]}]}, FIRST, _NOT_SHOWN),
        ("responses", {"input": [user({"type": "input_image", "file_id": "a"})]}, "input[0].content[0]", _NO_SOURCE),
        (
            "responses",
            {"input": [{"type": "function_call_output", "output": [responses(RED_URL)]}]},
            "input[0].output[0]",
            _NOT_SHOWN,
        ),
        ("messages", {"system": [BASE64], "messages": []}, "system[0]", _NOT_SHOWN),
    ],
)
def test_what_cannot_be_shown_is_refused_by_its_place(endpoint: str, body: Any, field: str, message: str) -> None:
    service = Service()
    refused = service.call(endpoint, body)
    assert refused.status_code == 422
    [problem] = refused.json()["errors"]
    assert problem["field"] == field
    assert message in problem["message"]
    assert (service.server.requests, service.kept.puts) == ([], [])


def test_a_service_without_images_leaves_calls_to_the_model_server() -> None:
    service = Service(takes_images=False)
    body = json.dumps({"messages": [user(TEXT, openai(RED_URL))]}).encode()
    assert service.call("chat/completions", body, in_session=False).status_code == 200
    assert service.server.requests[0].body == body


def test_a_call_of_more_images_than_a_sample_may_show_is_refused() -> None:
    service = Service(max_images=2)
    refused = service.call("chat/completions", {"messages": [user(*[openai(RED_URL)] * 3)]})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["message"] == "it shows 3 images, and images.max_images allows 2; show fewer"
    assert not service.kept.puts


def test_arguments_of_calls_are_no_images() -> None:
    arguments = {"type": "tool_use", "input": {"type": "image", "source": {"type": "url", "url": "x"}}}
    assert _images_of({"messages": [{"role": "assistant", "content": [arguments]}]}) == []


def test_the_sample_of_a_session_is_stored_with_names() -> None:
    service = Service()
    sample = {"task_name": "math", "messages": [user(TEXT, {"type": "image", "image": RED_URL})]}
    opened = service.http.request("POST", "/v1/sessions", json={"sample": sample})
    assert opened.status_code == 201, opened.text
    assert service.kept.puts == [[RED_NAME]]
    stored = asyncio.run(service.sessions.opened(opened.json()["id"])).request.sample
    assert stored is not None
    assert stored.model_dump(exclude_unset=True)["messages"] == [user(TEXT, {"type": "image", "image": RED_NAME})]


@pytest.mark.parametrize(
    ("service", "in_session"),
    [({"takes_images": False}, True), ({"model_sees": False}, True), ({"model_sees": False}, False)],
)
def test_no_call_shows_images_where_none_are_taken(service: dict[str, bool], in_session: bool) -> None:
    blind = Service(**service)
    refused = blind.call("chat/completions", {"messages": [user(TEXT, openai(RED_URL))]}, in_session)
    sample = {"task_name": "math", "messages": [user(TEXT, {"type": "image", "image": RED_URL})]}
    opened = blind.http.request("POST", "/v1/sessions", json={"sample": sample})
    for answer, field in ((refused, "messages[0].content[1]"), (opened, "sample.messages[0].content[1].image")):
        assert answer.status_code == 422
        [problem] = answer.json()["errors"]
        assert (problem["field"], problem["message"]) == (field, NOT_TAKEN)
    assert blind.call("chat/completions", {"messages": [user(TEXT)]}, in_session).status_code == 200
    assert (len(blind.server.requests), blind.kept.puts) == (1, [])

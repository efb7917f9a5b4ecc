"""`/blobs`: images are uploaded once, and are their key's alone."""

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from deployments.failures import ImagesLost
from deployments.images.book import ImagesSettings
from deployments.protocols.images import name_of_image
from service.admission.capacity import Amounts
from service.images.request_images import RequestImages
from service.settings import AdmissionSettings
from tests.deployments.images.pictures import picture
from tests.fakes.image_store import ImagesInProcess
from tests.service.keyed_http import KeyedHttp
from tests.service.scripted_http import LIMITS, ScriptedHttp

RED = picture("red")
NAME = name_of_image(RED)
PNG = {"content-type": "image/png"}


def images(**settings: Any) -> RequestImages:
    given = ImagesSettings(**settings)
    return RequestImages(ImagesInProcess(given), given)


def service(**settings: Any) -> ScriptedHttp:
    return ScriptedHttp(images=images(**settings))


def test_an_uploaded_image_is_named_by_its_content_and_can_be_read() -> None:
    http = service()
    uploaded = http.request("POST", "/v1/blobs", content=RED, headers=PNG)
    fields = uploaded.json()
    assert (uploaded.status_code, uploaded.headers["location"]) == (201, f"/v1/blobs/{NAME}")
    assert fields == {"name": NAME, "bytes": len(RED), "media_type": "image/png", "width": 4, "height": 3}
    read = http.request("GET", f"/v1/blobs/{NAME}")
    assert (read.status_code, read.content, read.headers["content-type"]) == (200, RED, "image/png")
    assert (read.headers["x-content-type-options"], read.headers["cache-control"]) == ("nosniff", "private, immutable")
    assert http.request("POST", "/blobs", content=RED, headers=PNG).json()["name"] == NAME


def test_its_type_is_that_of_the_content() -> None:
    http = service()
    jpeg = picture("blue", "JPEG")
    for given in ("image/png", "application/octet-stream", ""):
        uploaded = http.request("POST", "/blobs", content=jpeg, headers={"content-type": given})
        assert uploaded.json()["media_type"] == "image/jpeg"
    assert http.request("GET", f"/blobs/{name_of_image(jpeg)}").headers["content-type"] == "image/jpeg"


@pytest.mark.parametrize(
    ("body", "headers", "status", "name", "says"),
    [
        (b"", PNG, 422, "invalid-request", "body: it is not PNG or JPEG, it begins with nothing; convert it."),
        (picture(size=(50, 3)), PNG, 422, "invalid-request", "images.max_pixels allows 100; scale it down."),
        (bytes(2001), PNG, 413, "body-too-large", "larger than the limit of 2000 bytes"),
        (RED, {"content-type": "application/json"}, 415, "unsupported-media-type", "send image/png or image/jpeg"),
        (RED, {**PNG, "content-encoding": "gzip"}, 400, "unreadable-body", "it is not the gzip that Content-Encoding"),
    ],
)
def test_what_is_not_taken_is_a_problem_that_says_why(
    body: bytes, headers: dict[str, str], status: int, name: str, says: str
) -> None:
    refused = service(max_pixels=100, max_image_bytes=2000).request("POST", "/blobs", content=body, headers=headers)
    problem = refused.json()
    assert (refused.status_code, problem["type"]) == (status, f"urn:rollout:problem:{name}")
    assert says in problem["detail"]


def test_an_image_that_is_not_there_is_a_problem() -> None:
    unknown = service().request("GET", f"/blobs/{NAME}")
    assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:rollout:problem:image-unknown")
    assert unknown.json()["errors"][0]["value"] == NAME
    for bad in ("sha256:12", NAME.upper(), "red.png"):
        assert service().request("GET", f"/blobs/{bad}").status_code == 422


def test_a_store_without_room_says_when_to_try_again() -> None:
    full = service(max_bytes=10).request("POST", "/blobs", content=RED, headers=PNG)
    assert (full.status_code, full.json()["type"]) == (429, "urn:rollout:problem:images-full")
    assert full.headers["retry-after"] == "30"


def test_an_upload_is_admitted_with_its_body() -> None:
    bounds = AdmissionSettings(max_body_bytes=len(RED) - 1)
    http = ScriptedHttp(images=images(), admission=bounds)
    refused = http.request("POST", "/blobs", content=RED, headers=PNG)
    assert (refused.status_code, http.admission.in_flight) == (413, Amounts())
    small = ScriptedHttp(LIMITS.model_copy(update={"max_body_bytes": 1}), images=images())
    assert small.request("POST", "/blobs", content=RED, headers=PNG).status_code == 201
    assert small.admission.in_flight == Amounts()


def test_a_store_that_is_away_is_not_ready() -> None:
    lost = images()
    lost.store.put = AsyncMock(side_effect=ImagesLost("It cannot be reached."))  # type: ignore[method-assign]
    away = ScriptedHttp(images=lost).request("POST", "/blobs", content=RED, headers=PNG)
    assert (away.status_code, away.json()["type"]) == (503, "urn:rollout:problem:not-ready")


def test_without_images_in_the_config_there_are_no_blobs() -> None:
    for method, path in (("POST", "/blobs"), ("GET", f"/blobs/{NAME}")):
        assert ScriptedHttp().request(method, path, content=RED, headers=PNG).status_code == 501
    assert ScriptedHttp().request("GET", f"/blobs/{NAME}").json()["type"] == "urn:rollout:problem:images-not-configured"


def test_an_image_is_its_keys_alone(tmp_path: Path) -> None:
    keyed = KeyedHttp(tmp_path, images=images())
    http = keyed.service
    assert http.request("POST", "/blobs", content=RED, headers={**PNG, **keyed.bearer("rollout")}).status_code == 201
    assert http.request("GET", f"/blobs/{NAME}", headers=keyed.bearer("rollout")).content == RED
    assert http.request("GET", f"/blobs/{NAME}", headers=keyed.bearer("admin")).status_code == 404

    assert http.request("POST", "/blobs", content=RED, headers={**PNG, **keyed.bearer("admin")}).status_code == 201
    assert http.request("GET", f"/blobs/{NAME}", headers=keyed.bearer("admin")).content == RED

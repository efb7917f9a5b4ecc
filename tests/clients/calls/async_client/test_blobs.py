"""`upload_image` and `image` against the application."""

from pathlib import Path

import pytest

from deployments.images.book import ImagesSettings
from deployments.protocols.images import name_of_image
from rollout_client import RequestRejected, ServiceUnreachable
from service.images.request_images import RequestImages
from tests.clients.client_calls import call
from tests.deployments.images.pictures import picture
from tests.fakes.image_store import ImagesInProcess
from tests.service.scripted_http import ScriptedHttp

RED, BLUE = picture("red"), picture("blue", "JPEG")


@pytest.fixture
def http() -> ScriptedHttp:
    return ScriptedHttp(images=RequestImages(ImagesInProcess(), ImagesSettings()))


def test_an_image_is_uploaded_from_memory_or_from_a_file_and_read_back(http: ScriptedHttp, tmp_path: Path) -> None:
    file = tmp_path / "blue.jpeg"
    file.write_bytes(BLUE)
    assert http.call(lambda client: client.upload_image(RED)) == name_of_image(RED)
    assert http.call(lambda client: client.upload_image(file)) == name_of_image(BLUE)
    assert http.call(lambda client: client.upload_image(str(file))) == name_of_image(BLUE)
    assert http.call(lambda client: client.image(name_of_image(RED))) == RED
    assert http.call(lambda client: client.image(name_of_image(BLUE))) == BLUE


def test_what_the_service_refuses_says_why(http: ScriptedHttp) -> None:
    with pytest.raises(RequestRejected, match="it is not PNG or JPEG, it begins with 68 65 6c 6c 6f; convert it"):
        http.call(lambda client: client.upload_image(b"hello"))
    with pytest.raises(RequestRejected, match="there is no such image") as unknown:
        http.call(lambda client: client.image(name_of_image(b"never")))
    assert unknown.value.status == 404


def test_a_file_that_is_not_there_and_a_service_that_is_not_there_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        call("http://127.0.0.1:9", lambda client: client.upload_image(tmp_path / "none.png"))
    with pytest.raises(ServiceUnreachable):
        call("http://127.0.0.1:9", lambda client: client.upload_image(RED), retries=0)

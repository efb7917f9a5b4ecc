"""`upload_image` and `image` against the application."""

from pathlib import Path

import pytest

from deployments.images.book import ImagesSettings
from deployments.protocols.images import name_of_image
from service.images.request_images import RequestImages
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

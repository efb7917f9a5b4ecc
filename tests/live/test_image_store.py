"""The image store of a running service: it loses no image when it dies, and what goes leaves Ray's memory."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from random import Random

import pytest
from PIL import Image

from deployments.protocols.images import name_of_image
from rollout_client import RequestRejected, RolloutClient
from tests.live.running_service import processes, replicas, shared_bytes
from tests.live.services import IMAGES_BYTES

pytestmark = pytest.mark.long
MIB = 2**20
SIDE = 590
"""Of a picture of noise with about a MiB."""
NOT_FOUND = 404


def noise(seed: int) -> bytes:
    file = BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), Random(seed).randbytes(3 * SIDE * SIDE)).save(file, "PNG")
    return file.getvalue()


def test_an_image_outlives_its_store(simulated_client: RolloutClient) -> None:
    image = noise(0)
    name = simulated_client.upload_image(image)
    assert name == name_of_image(image)
    assert simulated_client.image(name) == image
    [store] = replicas("Images")
    store.kill()
    # At once: the ingress waits for the next store, which makes the object anew.
    assert simulated_client.image(name) == image
    assert simulated_client.upload_image(image) == name
    [after] = replicas("Images")
    assert after.pid != store.pid


def test_images_that_went_for_others_leave_rays_memory(simulated_client: RolloutClient) -> None:
    """80 MiB pass through a store of 16, each image read four times."""

    def passed(seed: int) -> str:
        image = noise(seed)
        name = simulated_client.upload_image(image)
        assert [simulated_client.image(name) == image for _ in range(4)] == [True] * 4
        return name

    [raylet] = [process for process in processes("raylet/raylet") if "agent" not in process.name()]
    before = shared_bytes(raylet)
    with ThreadPoolExecutor(4) as threads:
        names = list(threads.map(passed, range(10, 90)))
    assert shared_bytes(raylet) - before < 3 * IMAGES_BYTES
    kept = [name for name in names if is_kept(simulated_client, name)]
    assert 8 <= len(kept) <= IMAGES_BYTES // MIB
    assert names[-1] in kept


def is_kept(simulated_client: RolloutClient, name: str) -> bool:
    try:
        return bool(simulated_client.image(name))
    except RequestRejected as error:
        if error.status != NOT_FOUND:
            raise
        return False

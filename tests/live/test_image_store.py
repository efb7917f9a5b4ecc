"""The image store of a running service: it loses no image when it dies, and what goes leaves Ray's memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from random import Random
from typing import Any

import psutil
import pytest
from PIL import Image
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema
from rich.console import Console

from deployments.protocols.images import name_of_image
from rollout_client import RequestRejected, RolloutClient
from service.images.request_images import NOT_TAKEN
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.live.painting_environment import painted
from tests.live.running_service import processes, replicas
from tests.live.weights_on_nodes import status_bytes
from tests.paths import REPOSITORY

pytestmark = pytest.mark.long
MIB = 2**20
MOST_BYTES = 16 * MIB
SIDE = 590
"""Of a picture of noise with about a MiB."""
NOT_FOUND = 404


def images_config() -> Any:
    config = read_config(REPOSITORY / "serve_config.scale.yaml", port=free_port())
    [application] = config.applications
    application.args["environments"] = {
        "painting": {"import_path": "tests.live.painting_environment:PaintingEnvironment"}
    }
    application.args["jobs"] = {}
    application.args["images"] = {"max_bytes": MOST_BYTES, "keep_s": 0}
    replicas_of = {"Ingress": 2, "painting": 1, "Generator": 1}
    application.deployments = [
        DeploymentSchema(name=name, num_replicas=count, ray_actor_options=RayActorOptionsSchema(num_cpus=0.1))
        for name, count in replicas_of.items()
    ]
    return config


@pytest.fixture(scope="module")
def client() -> Iterator[RolloutClient]:
    with local_service(images_config(), Console(stderr=True)) as url, RolloutClient(url) as rollout_client:
        yield rollout_client


def noise(seed: int) -> bytes:
    file = BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), Random(seed).randbytes(3 * SIDE * SIDE)).save(file, "PNG")
    return file.getvalue()


def test_an_image_outlives_its_store(client: RolloutClient) -> None:
    image = noise(0)
    name = client.upload_image(image)
    assert name == name_of_image(image)
    assert client.image(name) == image
    [store] = replicas("Images")
    store.kill()
    # At once: the ingress waits for the next store, which makes the object anew.
    assert client.image(name) == image
    assert client.upload_image(image) == name
    [after] = replicas("Images")
    assert after.pid != store.pid


def test_what_an_environment_shows_is_kept_by_its_name(client: RolloutClient) -> None:
    colors = ["red", "blue"]
    sample = {"messages": [{"role": "user", "content": "Show."}], "extra_env_info": {"colors": colors}}
    played = client.rollout([{"task_name": "painting", **sample}], sampling={"max_new_tokens": 4})
    # A simulated engine sees nothing.
    [error] = [result.error for result in played.samples]
    assert error is not None
    assert "takes no images" in error.message
    assert [client.image(name_of_image(painted(color))) for color in colors] == [painted(color) for color in colors]


def test_a_model_that_takes_no_images_is_shown_none_in_requests_and_jobs(client: RolloutClient) -> None:
    name = client.upload_image(painted("red"))
    content = [{"type": "image", "image": name}, {"type": "text", "text": "Which color?"}]
    sample = {"messages": [{"role": "user", "content": content}], "extra_env_info": {"colors": ["red"]}}
    samples: list[Any] = [{"task_name": "painting", **sample}]
    for start in (client.rollout, client.jobs.submit):
        with pytest.raises(RequestRejected) as refused:
            start(samples)
        [error] = refused.value.problem.errors
        assert (error.field, error.message) == ("samples[0].messages[0].content[0].image", NOT_TAKEN)
    assert client.jobs.all() == []


def test_an_image_that_cannot_be_decoded_is_not_kept(client: RolloutClient) -> None:
    with pytest.raises(RequestRejected, match="it cannot be decoded"):
        client.upload_image(noise(1)[: MIB // 2])


def test_images_that_went_for_others_leave_rays_memory(client: RolloutClient) -> None:
    """80 MiB pass through a store of 16, each image read four times."""

    def passed(seed: int) -> str:
        image = noise(seed)
        name = client.upload_image(image)
        assert [client.image(name) == image for _ in range(4)] == [True] * 4
        return name

    [raylet] = [process for process in processes("raylet/raylet") if "agent" not in process.name()]
    before = shared_bytes(raylet)
    with ThreadPoolExecutor(4) as threads:
        names = list(threads.map(passed, range(10, 90)))
    assert shared_bytes(raylet) - before < 3 * MOST_BYTES
    kept = [name for name in names if is_kept(client, name)]
    assert 8 <= len(kept) <= MOST_BYTES // MIB
    assert names[-1] in kept


def shared_bytes(process: psutil.Process) -> int:
    return status_bytes(process, "RssShmem")


def is_kept(client: RolloutClient, name: str) -> bool:
    try:
        return bool(client.image(name))
    except RequestRejected as error:
        if error.status != NOT_FOUND:
            raise
        return False

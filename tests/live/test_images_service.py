"""Images through a running service: sent, uploaded, shown by an environment, and recomputed by a trainer."""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.service_process import service_process
from deployments.protocols.images import name_of_image
from rollout_client import RequestRejected, RolloutClient, Sampling
from rollout_client.results import resumed
from rollout_client.tensors import images_shown
from service.startup.ports import free_port
from tests.live.running_service import replicas
from tests.live.seeing_environment import TURNS
from tests.paths import REPOSITORY
from tests.vision_model import SeenByTransformers, picture, save_vision_model

pytestmark = pytest.mark.long
NEAR = 2e-3
GREEDY = Sampling(temperature=0.0, max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    served: dict[str, Any] = yaml.safe_load((REPOSITORY / "serve_config.cpu.yaml").read_text())
    served["http_options"]["port"] = free_port()
    [application] = served["applications"]
    args = application["args"]
    args["engine"] |= {"model": str(folder), "dtype": "float32", "max_model_len": 2000, "max_num_batched_tokens": 2000}
    args["images"] = {}
    args["environments"] = {"seeing": {"import_path": "tests.live.seeing_environment:SeeingEnvironment"}}
    application["deployments"] = [
        {"name": "Ingress", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.2}},
        {"name": "Generator", "num_replicas": 1},
        {"name": "seeing", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
    ]
    with service_process(served, REPOSITORY) as (running, _):
        yield running


@pytest.fixture
def client(url: str) -> Iterator[RolloutClient]:
    with RolloutClient(url) as client:
        yield client


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def sample(*images: str, seed: int = 0) -> dict[str, Any]:
    parts: list[dict[str, str]] = [{"type": "text", "text": "Look at "}]
    for image in images:
        parts += [{"type": "image", "image": image}, {"type": "text", "text": ", "}]
    return {
        "task_name": "seeing",
        "messages": [{"role": "user", "content": parts}],
        "extra_env_info": {"seed": seed},
    }


def check(client: RolloutClient, folder: Path, response: Any) -> None:
    """The log-probabilities are those that transformers computes with the pictures that the service has."""
    seen = SeenByTransformers(folder)
    for result in response.samples:
        assert result.error is None
        pictures = {name: client.image(name) for name in images_shown(result.message_log)}
        assert seen.differences(result, pictures).abs().max() < NEAR


def test_pictures_of_prompts_and_observations_are_in_the_log_by_name_with_their_ranges(
    client: RolloutClient, folder: Path
) -> None:
    small, wide = picture(64, 64, 1), picture(120, 50, 2)
    name = client.upload_image(small)
    assert name == name_of_image(small)
    response = client.rollout([sample(name, data_url(wide), name)], sampling=GREEDY, max_rollout_turns=TURNS)
    [result] = response.samples
    assert result.status == "completed"
    assert result.total_reward == TURNS
    shown = [name_of_image(picture(64, 64, place)) for place in range(TURNS)]
    assert [[place.media for place in message.mm_ranges or ()] for message in result.message_log] == [
        [name, name_of_image(wide), name],
        *([], shown[:1]),
        *([], shown[:2]),
        *([], shown[1:3]),
        *([], shown[2:4]),
    ]
    # The environment was told of those of the log before its last observation.
    assert result.answer == str(3 + 1 + 2 + 2)
    check(client, folder, response)


def test_json_and_arrow_agree_and_lockstep_plays_as_async_does(client: RolloutClient, folder: Path) -> None:
    samples = [sample(data_url(picture(64, 64, 5)), seed=seed) for seed in (10, 20)]
    whole = client.rollout(samples, sampling=GREEDY, max_rollout_turns=3)
    arrow = client.rollout_arrow(samples, sampling=GREEDY, max_rollout_turns=3)
    lockstep = client.rollout(samples, sampling=GREEDY, max_rollout_turns=3, schedule="lockstep")
    logs = [
        [
            [(message.role, list(message.token_ids), message.mm_ranges) for message in result.message_log]
            for result in response.samples
        ]
        for response in (whole, arrow, lockstep)
    ]
    assert logs[0] == logs[1] == logs[2]
    check(client, folder, lockstep)


def test_a_log_that_was_returned_goes_on_as_if_it_had_not_been_cut(client: RolloutClient) -> None:
    given = sample(data_url(picture(64, 64, 7)), seed=30)
    [whole] = client.rollout([given], sampling=GREEDY, max_rollout_turns=TURNS).samples
    [first] = client.rollout([given], sampling=GREEDY, max_rollout_turns=2).samples
    [rest] = client.rollout([resumed(first)], sampling=GREEDY, max_rollout_turns=TURNS).samples
    assert [message.token_ids for message in rest.message_log] == [message.token_ids for message in whole.message_log]
    assert [message.mm_ranges for message in rest.message_log] == [message.mm_ranges for message in whole.message_log]


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (data_url(b"not an image"), "PNG, JPEG or WebP"),
        (f"sha256:{'0' * 64}", "there is no such image: it has expired, or it is another key's; upload it again"),
        ("https://pictures.example.org/a.png", "allowed_hosts"),
        ("data:image/png;base64,%%%", "its data URL is not base64"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place_in_the_request(
    client: RolloutClient, image: str, problem: str
) -> None:
    with pytest.raises(RequestRejected, match=problem) as refused:
        client.rollout([sample(data_url(picture(64, 64, 1))), sample(image)], sampling=GREEDY)
    assert "samples[1].messages[0].content[1].image" in str(refused.value)


def test_no_rollout_with_pictures_is_lost_when_the_engine_dies(client: RolloutClient, folder: Path) -> None:
    samples = [sample(data_url(picture(64, 64, 40)), seed=seed) for seed in range(100, 116)]
    long = Sampling(temperature=0.0, max_new_tokens=120, ignore_eos=True)
    whole = client.rollout(samples, sampling=long, max_rollout_turns=TURNS)
    [killed] = replicas("Generator")
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(client.rollout, samples, sampling=long, max_rollout_turns=TURNS, sample_retries=8)
        time.sleep(0.3)
        killed.kill()
        assert not playing.done(), "the rollouts were over before the replica was killed"
        after = playing.result()
    assert [[message.token_ids for message in result.message_log] for result in after.samples] == [
        [message.token_ids for message in result.message_log] for result in whole.samples
    ]
    check(client, folder, after)

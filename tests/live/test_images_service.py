"""Images through a running service: in rollouts and in sessions, shown by environments, recomputed by a trainer."""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from safetensors.torch import load_file

from benchmarks.reference_model import State, load, merged, perturbed, write_adapter
from deployments.protocols.images import name_of_image
from rollout_client import PolicyPusher, RolloutClient, Sampling
from rollout_client.contract.rollouts import SampleResult
from rollout_client.tensors import images_shown
from service.startup.config import free_port, read_config
from tests.live.running_service import replicas
from tests.live.seeing_environment import TURNS
from tests.live.services import CONFIG, RUNNING, replicas_of
from tests.vision_model import SeenByTransformers, picture, save_vision_model

pytestmark = pytest.mark.long
NEAR = 2e-3
TOKENS = 8
OF_SESSION: Any = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
GREEDY = Sampling(**OF_SESSION)
SMALL, WIDE = picture(64, 64, 1), picture(120, 50, 2)
SHOWN_FIRST = picture(64, 64, 60)
"""What the environment shows after the first response, for a seed of 60."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    environments: dict[str, Any] = {
        "seeing": {"import_path": "tests.live.seeing_environment:SeeingEnvironment"},
        "shown": {"agent": {"import_path": "tests.live.played_by_agents:shows_its_sample", "scored_by": "agent"}},
    }
    config = read_config(CONFIG, port=free_port())
    [application] = config.applications
    application.args |= {"environments": environments, "images": {}, "sessions": {}}
    application.args["engine"] |= {"model": str(folder), "dtype": "float32", "max_model_len": 2000}
    application.args["engine"] |= {"max_num_batched_tokens": 2000, "num_cpus": 0.5}
    application.args["engine"] |= {"enable_lora": True, "enable_tower_connector_lora": True}
    application.deployments = replicas_of({"Ingress": 1, "Generator": 1, "seeing": 1})
    return RUNNING.url("seeing", lambda: config)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[RolloutClient]:
    with RolloutClient(url) as client:
        yield client


@pytest.fixture
def original(client: RolloutClient, folder: Path) -> Iterator[State]:
    """The weights that are served, and after the test again."""
    state = load_file(folder / "model.safetensors")
    yield state
    client.push_weights(state)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def sample(*images: str, seed: int = 0) -> dict[str, Any]:
    parts: list[dict[str, str]] = []
    for image in images:
        parts += [text(" and " if parts else "Look at "), {"type": "image", "image": image}]
    return {"task_name": "seeing", "messages": [user(*parts)], "extra_env_info": {"seed": seed}}


def image_url(image: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image}}


def block(image: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(image)}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def ids_of(result: SampleResult) -> list[list[int]]:
    return [list(message.token_ids) for message in result.message_log]


def names_of(result: SampleResult) -> list[list[str]]:
    return [[place.media for place in message.mm_ranges or ()] for message in result.message_log]


def check(client: RolloutClient, folder: Path, *results: SampleResult) -> None:
    """The log-probabilities are those that transformers computes with the pictures that the service has."""
    seen = SeenByTransformers(folder)
    for result in results:
        assert result.error is None
        pictures = {name: client.image(name) for name in images_shown(result.message_log)}
        assert pictures
        assert seen.differences(result, pictures).abs().max() < NEAR


def rollout(client: RolloutClient, turns: int) -> SampleResult:
    """The conversation as `POST /rollout` plays it."""
    asked = sample(data_url(SMALL), data_url(WIDE), seed=60)
    [result] = client.rollout([asked], sampling=GREEDY, max_rollout_turns=turns).samples
    assert result.error is None
    return result


def test_pictures_are_in_the_log_by_name_with_their_ranges(client: RolloutClient, folder: Path) -> None:
    name = client.upload_image(SMALL)
    assert name == name_of_image(SMALL)
    asked = sample(name, data_url(WIDE), name)
    [result] = client.rollout([asked], sampling=GREEDY, max_rollout_turns=TURNS).samples
    assert result.status == "completed"
    assert result.total_reward == TURNS
    shown = [name_of_image(picture(64, 64, place)) for place in range(TURNS)]
    assert names_of(result) == [
        [name, name_of_image(WIDE), name],
        *([], shown[:1]),
        *([], shown[:2]),
        *([], shown[1:3]),
        *([], shown[2:4]),
    ]
    # The environment was told of those of the log before its last observation.
    assert result.answer == str(3 + 1 + 2 + 2)
    check(client, folder, result)


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
    assert list(map(ids_of, after.samples)) == list(map(ids_of, whole.samples))
    check(client, folder, *after.samples)


def played_by_openai(client: RolloutClient, kill: str | None = None) -> SampleResult:
    """The conversation by chat completions, with names and data URLs.

    Args:
        kill: a deployment whose replica dies between the calls.
    """
    name = client.upload_image(SMALL)
    with (
        client.sessions.open(sampling=OF_SESSION) as session,
        openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=8) as model,
    ):

        def ask(messages: Any) -> str | None:
            return model.chat.completions.create(model="any", messages=messages).choices[0].message.content

        start = [user(text("Look at "), image_url(name), text(" and "), image_url(data_url(WIDE)))]
        answered = ask(start)
        if kill is not None:
            [killed] = replicas(kill)
            killed.kill()
        ask([*start, assistant(answered), user(image_url(data_url(SHOWN_FIRST)), text("Turn 0"))])
        assert session.drift().drift == []
        [sample] = session.samples()
        return sample


def test_openais_client_has_a_rollouts_ids_and_transformers_logprobs(client: RolloutClient, folder: Path) -> None:
    played, sample = rollout(client, 2), played_by_openai(client)
    assert ids_of(sample)[:4] == ids_of(played)[:4]
    assert [each.mm_ranges for each in sample.message_log] == [each.mm_ranges for each in played.message_log[:4]]
    assert names_of(sample) == [[name_of_image(SMALL), name_of_image(WIDE)], [], [name_of_image(SHOWN_FIRST)], []]
    check(client, folder, sample)


def test_anthropics_client_shows_the_same(client: RolloutClient) -> None:
    with (
        client.sessions.open(sampling=OF_SESSION) as session,
        anthropic.Anthropic(base_url=session.anthropic_base_url, api_key=session.api_key) as model,
    ):

        def ask(messages: Any) -> Any:
            asked: Any = {"model": "any", "max_tokens": TOKENS, "messages": messages}
            with model.messages.stream(**asked) as stream:
                return stream.get_final_message().content

        start = [user(text("Look at "), block(SMALL), text(" and "), block(WIDE))]
        answered = [text(each.text) for each in ask(start)]
        ask([*start, assistant(answered), user(block(SHOWN_FIRST), text("Turn 0"))])
        [sample] = session.samples()
    assert ids_of(sample) == ids_of(played_by_openai(client))


def test_the_responses_api_and_a_call_without_session_show_one_prompt(client: RolloutClient, url: str) -> None:
    [prompt, *_] = ids_of(rollout(client, 1))
    parts = [text("Look at "), image_url(data_url(SMALL)), text(" and "), image_url(data_url(WIDE))]
    with (
        client.sessions.open(sampling=OF_SESSION) as session,
        openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as model,
    ):
        items: Any = [
            {"type": "input_text", "text": part["text"]}
            if "text" in part
            else {"type": "input_image", "image_url": part["image_url"]["url"]}
            for part in parts
        ]
        model.responses.create(model="any", input=[{"role": "user", "content": items}])
        [sample] = session.samples()
    assert ids_of(sample)[0] == prompt
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as direct:
        messages: Any = [{"role": "user", "content": parts}]
        name = direct.models.list().data[0].id
        answer = direct.chat.completions.create(
            model=name, messages=messages, max_tokens=2, extra_body={"return_token_ids": True}
        )
    assert (answer.model_extra or {})["prompt_token_ids"] == prompt


def test_a_program_that_plays_a_task_shows_the_images_of_its_sample(client: RolloutClient, folder: Path) -> None:
    asked = {"task_name": "shown", "messages": sample(data_url(SMALL))["messages"]}
    [result] = client.rollout([asked], sampling=GREEDY).samples
    assert result.error is None
    assert result.total_reward == 1.0
    assert names_of(result) == [[name_of_image(SMALL)], [], [name_of_image(SMALL)], []]
    check(client, folder, result)
    [branch] = result.branches or []
    assert branch.message_log[0].mm_ranges == result.message_log[0].mm_ranges
    [arrow] = client.rollout_arrow([asked], sampling=GREEDY).samples
    assert [message.mm_ranges for message in arrow.message_log] == [message.mm_ranges for message in result.message_log]


@pytest.mark.parametrize("deployment", ["Sessions", "Generator"])
def test_a_session_with_images_goes_on_as_if_nothing_had_died(client: RolloutClient, deployment: str) -> None:
    whole = played_by_openai(client)
    assert ids_of(played_by_openai(client, kill=deployment)) == ids_of(whole)


TOWERS = ("vision_model", "text_model")


def said_by(client: RolloutClient, folder: Path, weights: State) -> float:
    """The largest difference from the log-probabilities of transformers with these weights."""
    seen = SeenByTransformers(folder)
    load(seen.model, weights)
    response = client.rollout([sample(data_url(WIDE), data_url(SMALL))], sampling=GREEDY, max_rollout_turns=TURNS)
    [result] = response.samples
    assert result.error is None
    pictures = {name: client.image(name) for name in images_shown(result.message_log)}
    return seen.differences(result, pictures).abs().max().item()


def test_either_tower_is_pushed_whole_in_part_or_by_delta(client: RolloutClient, folder: Path, original: State) -> None:
    weights = perturbed(original, seed=1)
    client.push_weights(weights)
    assert said_by(client, folder, weights) < NEAR
    for tower in TOWERS:
        others = perturbed(weights, seed=2)
        part = {name: tensor for name, tensor in others.items() if tower in name}
        client.push_weights(part, kind="partial")
        assert said_by(client, folder, weights) > NEAR
        weights |= part
        assert said_by(client, folder, weights) < NEAR
    pusher = PolicyPusher(client)
    whole = pusher.push(weights)
    for tensor in weights.values():
        tensor.view(-1)[0] += 0.5
    changed = pusher.push(weights)
    assert changed.sent_bytes < whole.sent_bytes / 10
    assert said_by(client, folder, weights) < NEAR


@pytest.mark.parametrize("tower", TOWERS)
def test_an_adapter_of_either_tower_generates(
    client: RolloutClient, folder: Path, original: State, tmp_path: Path, tower: str
) -> None:
    layers = {name: tensor for name, tensor in original.items() if tower in name and name.endswith("q_proj.weight")}
    base = client.push_weights(original).version
    added = write_adapter(tmp_path / "adapter", layers, ["q_proj"], seed=3, scale=1.0)
    client.push_weights(tmp_path / "adapter", kind="adapter", base=base)
    assert said_by(client, folder, original) > NEAR
    assert said_by(client, folder, merged(original, added)) < NEAR

"""Trainers that drive the running service as one vLLM server: pauses that end, adapters and checkpoints by path."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file

from benchmarks.reference_model import merged
from rollout_client import RolloutClient
from rollout_client.contract.base import label_of
from tests.live.forward_pass import adapter_folder, model_of, perturbed
from tests.live.played_with_weights import assert_of_weights, play
from tests.live.running_transfer import ConnectedTrainer

pytestmark = pytest.mark.usefixtures("leaves_the_original_weights")
PAUSE_S = 4
"""`trainers.pause_s` of the service."""
GOES_ON_WITHIN_S = 30
TRAINER = """
import sys, time, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="POST"))
print("done", flush=True)
time.sleep(600)
"""
"""A trainer that makes one call and never another."""


@pytest.fixture(scope="module")
def http(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=300) as http:
        yield http


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generated(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """One choice of eight tokens."""
    sampling = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    [choice] = post(http, "/inference/v1/generate", token_ids=[5, 6, 7], sampling_params=sampling, **fields)["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in choice["token_ids"]]
    return dict(choice)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_stops_generations_until_it_is_resumed_or_ends_by_itself(http: httpx.Client, mode: str) -> None:
    began = time.monotonic()
    assert post(http, f"/pause?mode={mode}") == {"status": "paused"}
    with ThreadPoolExecutor(1) as thread:
        generation = thread.submit(lambda: (generated(http), time.monotonic()))
        time.sleep(0.5)
        resumed = time.monotonic()
        assert post(http, "/resume") == {"status": "resumed"}
    # On a busy machine it may have ended by itself before.
    assert generation.result()[1] >= min(resumed, began + PAUSE_S)
    assert http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("call", ["/pause?mode=keep", "/start_weight_update"])
def test_a_trainer_that_is_killed_leaves_the_service_generating_by_whole_weights(
    client: RolloutClient, http: httpx.Client, call: str
) -> None:
    state = perturbed(52)
    version = client.push_weights(state).version
    trainer = ConnectedTrainer(client, model_of(perturbed(53)))
    command = [sys.executable, "-c", TRAINER, f"{client.base_url}{call}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"done\n"
        killed.kill()
    began = time.monotonic()
    choice = generated(http)
    assert time.monotonic() - began < GOES_ON_WITHIN_S
    del trainer
    assert [span["version"] for span in choice["weight_versions"]] == [str(version)]
    assert_of_weights(play(client).samples, version, state)


def test_adapters_come_by_their_path_and_answer_by_their_name(
    client: RolloutClient, http: httpx.Client, checkpoint_root: Path
) -> None:
    base = perturbed(54)
    client.push_weights(base)
    folder, name = checkpoint_root / "adapter", "skyrl-lora"
    for version, path in enumerate(("/v1/load_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"), 1):
        # Trainers write each over the last one.
        shutil.rmtree(folder, ignore_errors=True)
        added = adapter_folder(folder, seed=version)
        post(http, "/pause?mode=keep")
        post(http, path, lora_name=name, lora_path=str(folder))
        post(http, "/resume")
        choice = generated(http, model=name)
        assert [span["version"] for span in choice["weight_versions"]] == [label_of(name, version)]
        assert_of_weights(play(client, policy={"name": name}).samples, label_of(name, version), merged(base, added))
    post(http, "/unload_lora_adapter", lora_name=name)
    refused = http.post("/v1/completions", json={"model": name, "prompt": "Hi", "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


def test_a_checkpoint_comes_by_its_folder_and_the_model_by_its_path(
    client: RolloutClient, http: httpx.Client, checkpoint_root: Path
) -> None:
    state, folder = perturbed(55), checkpoint_root / "step_7"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    before = client.policy.state().current
    post(http, "/pause?mode=keep&clear_cache=false")
    post(http, "/update_weights", weight_dir=str(folder))
    post(http, "/resume")
    assert http.get("/weight_info").json() == {"weight_version": str(before + 1)}
    path = http.get("/server_info").json()["vllm_config"]["model_config"]["model"]
    choice = generated(http, model=path)
    assert [span["version"] for span in choice["weight_versions"]] == [str(before + 1)]
    assert_of_weights(play(client).samples, before + 1, state)

"""SkyRL's, prime-rl's and TRL's own clients of a vLLM server train on a service with two replicas and two ingresses.

`trainer_sources.py` fetches the sources, which stay as they are. `attached_program.py` runs them; here is what must
have come of the weights that they have sent.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks.reference_model import State, logprobs_of, merged
from rollout_client import RolloutClient
from service.startup.config import free_port, read_config
from tests.live.forward_pass import adapter_folder, model_of, perturbed, tiny_state
from tests.live.played_with_weights import assert_of_weights, play
from tests.live.services import CONFIG, RUNNING
from tests.paths import REPOSITORY, TINY_MODEL

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
SOURCES, PYTHON_OF_VERIFIERS = Path(os.environ["ROLLOUT_TRAINERS"]), REPOSITORY / ".bridges/verifiers/bin/python"
PACKAGES = {
    "skyrl": ("skyrl",),
    "prime_rl": ("prime_rl/src", "prime_rl/packages/prime-rl-configs/src"),
    "nemo_rl": ("nemo_rl",),
    "trl": (),
}
"""Folders for Python to search; TRL is installed."""
NEAR = 0.02
"""Of some hundred greedy tokens: those of the nearest other weights (an adapter's) are off by 0.06 and more."""
STATES = [perturbed(61), perturbed(62)]
PROMPTS = [AutoTokenizer.from_pretrained(TINY_MODEL).encode(f"What is {number} + 7?") for number in range(32)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a client is asked to do; the service reads its folders."""
    folder = tmp_path_factory.mktemp("attached")
    config = read_config(CONFIG, port=free_port())
    [application] = config.applications
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_cpus": 0.4}
    application.args["engine"] |= {**engine, "weight_transfer_config": {"backend": "gloo"}}
    trusted = {"trainers": ["127.0.0.1:1-65535"]}
    application.args |= {"trainers": {}, "policy": {"checkpoint_roots": [str(folder)], "transfer": trusted}}
    for deployment in application.deployments:
        deployment.num_replicas = 2 if deployment.name in ("Ingress", "Generator") else 1
    url = RUNNING.url("attached", lambda: config, PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests/live/gloo_plugin'}")
    asked = {"url": url, "model": str(TINY_MODEL), "prompts": PROMPTS, "adapter": str(folder / "adapter")}
    asked |= {"checkpoints": [str(folder / f"step-{number}") for number, _ in enumerate(STATES)]}
    for at, state in zip(asked["checkpoints"], STATES, strict=True):
        Path(at).mkdir()
        save_file(state, Path(at, "model.safetensors"))
    yield asked
    RUNNING.stop()


def played(name: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the client's program has written."""
    python = PYTHON_OF_VERIFIERS if name == "prime_rl" else Path(sys.executable)
    if missing := [path for path in (*(SOURCES / part for part in PACKAGES[name]), python) if not path.exists()]:
        pytest.skip(f"{missing[0]} is not there: docs/contributing.md says how to set it up")
    asked, results = folder / "job.json", folder / "results.json"
    asked.write_text(json.dumps(job))
    path = [*(str(SOURCES / part) for part in PACKAGES[name]), str(REPOSITORY)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    program: list[Any] = [python, "-m", "tests.sockets.attached_program", name, asked, results]
    # It ends what a client has started too.
    command = ["timeout", "--kill-after=5", "600", *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return dict(json.loads(results.read_text()))


def assert_made_by(state: State, made: dict[str, Any]) -> None:
    """The tokens of each prompt have the log-probabilities that transformers computes with these weights."""
    model, distances = model_of(state), []
    for prompt, ids, logprobs in zip(PROMPTS, made["ids"], made["logprobs"], strict=True):
        own = logprobs_of(model, [*prompt, *ids])[-len(ids) :].tolist()
        distances += [abs(left - right) for left, right in zip(own, logprobs, strict=True)]
    assert len(distances) > 2 * len(PROMPTS)
    assert sum(distances) / len(distances) <= NEAR


@pytest.mark.parametrize("name", ["skyrl", "prime_rl"])
def test_weights_that_a_client_sends_make_the_tokens_it_gets(name: str, job: dict[str, Any], tmp_path: Path) -> None:
    with RolloutClient(job["url"]) as client:
        before = client.policy.state().current
        folders = [tmp_path / f"adapter-{seed}" for seed in (1, 2)]
        added = [adapter_folder(folder, seed) for seed, folder in enumerate(folders)]
        result = played(name, job | {"adapters": [str(folder) for folder in folders]}, tmp_path)
        for state, made in zip(STATES, result["rounds"], strict=True):
            longest = [len(ids) for ids in made["across"]["ids"]]
            assert (min(longest) if name == "skyrl" else max(longest)) == 96
            assert_made_by(state, made["after"])
        for each, made in zip(added, result["adapted"], strict=True):
            assert_made_by(merged(STATES[-1], each), made)
        policy = client.policy.state()
        assert (policy.current, len(policy.replicas), result.get("world_size", 2)) == (before + 2, 2, 2)
        assert_of_weights(play(client).samples, before + 2, STATES[-1])


def test_trl_trains_all_weights_over_three_updates(job: dict[str, Any], tmp_path: Path) -> None:
    with RolloutClient(job["url"]) as client:
        before, sent = client.policy.state().current, tmp_path / "sent.safetensors"
        steps = played("trl", job | {"sent": str(sent)}, tmp_path)["steps"]
        current = client.policy.state().current
        assert current >= before + 3
        assert_of_weights(play(client).samples, current, load_file(sent), before=tiny_state())
    # Later steps train on rollouts of the weights before.
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=0.01)


def test_nemo_rl_flattens_the_batch_that_the_service_has_played(job: dict[str, Any], tmp_path: Path) -> None:
    flat = played("nemo_rl", job, tmp_path)
    assert (flat["kind"], flat["shape"]) == ("BatchedDataDict", [2 * len(PROMPTS), max(flat["lengths"])])
    assert 2 * len(PROMPTS) <= flat["generated"] <= sum(flat["lengths"]) - 2 * sum(map(len, PROMPTS))

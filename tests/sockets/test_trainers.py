"""slime's and miles' own rollout modules against the running service, beside `/rollout`, and `/generate` in a session.

`trainer_sources.py` fetches their sources, which stay as they are. `trainer_program.py` calls them, here is what must
have come. The service has two ingress replicas: an abort reaches the calls of both.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from deployments.protocols.generation import derived_seed
from rollout_client import RolloutClient, Sampling
from rollout_client.contract.rollouts import SampleInput, SampleResult
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.live.running_service import wait_until_idle
from tests.paths import REPOSITORY, TINY_MODEL

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("trainer_program.py")
SOURCES = Path(os.environ["ROLLOUT_TRAINERS"])
TRAINERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not (SOURCES / name).is_dir(),
            reason=f"the sources of {name} could not be fetched: TRAINERS_FROM names clones",
        ),
    )
    for name in ("slime", "miles")
]
SEED, LENGTH, PROMPTS = 7, 24, 6
STREAMED = "slime.rollout.sglang_streaming_rollout.generate_streaming"
tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)


class World:
    """What the service says to its own client, and what a trainer got of it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self._folder = folder
        with RolloutClient(url) as client:
            samples = client.example_samples("math", count=PROMPTS)
            self.greedy = client.rollout(samples, sampling=Sampling(greedy=True, max_new_tokens=LENGTH)).samples
            seeded = [
                SampleInput.model_validate({**sample.model_dump(exclude_unset=True), "seed": SEED})
                for sample in samples
            ]
            self.seeded = client.rollout(seeded, sampling=Sampling(temperature=1.0, max_new_tokens=LENGTH)).samples
            self.prompts = [list(result.message_log[0].token_ids) for result in self.greedy]
            self.scores = client.score(
                [[*prompt, *turn_of(result)[0]] for prompt, result in zip(self.prompts, self.greedy, strict=True)]
            ).scores

    def played(self, trainer: str) -> dict[str, Any]:
        """The rounds of each job."""
        asked, results = self._folder / f"{trainer}-jobs.json", self._folder / f"{trainer}-results.json"
        asked.write_text(json.dumps({"url": self.url, "model": str(TINY_MODEL), "jobs": self._jobs(trainer)}))
        path = os.pathsep.join([str(SOURCES / trainer), str(PROGRAM.parent)])
        env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [sys.executable, PROGRAM, trainer, asked, results], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        rounds: dict[str, Any] = json.loads(results.read_text())
        return rounds | {"trainer": trainer}

    def _jobs(self, trainer: str) -> dict[str, Any]:
        texts = [tokenizer.decode(ids) for ids in self.prompts]
        whole = {"rollout_batch_size": PROMPTS, "over_sampling_batch_size": PROMPTS, "rollout_max_response_len": LENGTH}
        greedy = {**whole, "n_samples_per_prompt": 2, "rollout_temperature": 0.0}
        seeded = {
            **whole,
            "n_samples_per_prompt": 1,
            "rollout_temperature": 1.0,
            "sglang_enable_deterministic_inference": True,
            "rollout_seed": derived_seed(derived_seed(SEED, 0), 0),
        }
        cut = {
            "n_samples_per_prompt": 1,
            "rollout_batch_size": 1,
            "over_sampling_batch_size": PROMPTS,
            "rollout_temperature": 2.0,
            "rollout_max_response_len": 1000,
            "partial_rollout": True,
        }
        further = (
            {"custom_generate_function_path": STREAMED}
            if trainer == "slime"
            else {"recompute_logprobs_via_prefill": True}
        )
        return {
            "greedy": {"prompts": texts, "options": greedy},
            "seeded": {"prompts": texts, "options": seeded},
            "further": {"prompts": texts, "options": {**greedy, **further}},
            "cut": {"prompts": texts, "options": cut, "rounds": 3},
        }


def turn_of(result: SampleResult) -> tuple[list[int], list[float]]:
    """The response of a rollout of one turn, and its log-probabilities."""
    answered = result.message_log[1]
    assert answered.generation_logprobs is not None
    return list(answered.token_ids), list(answered.generation_logprobs)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    config = read_config(REPOSITORY / "serve_config.cpu.yaml", port=free_port())
    [application] = config.applications
    [ingress] = [deployment for deployment in application.deployments if deployment.name == "Ingress"]
    ingress.num_replicas = 2
    with local_service(config, Console(stderr=True)) as url:
        yield World(tmp_path_factory.mktemp("trainers"), url)


@pytest.fixture(scope="module", params=TRAINERS)
def rounds(request: pytest.FixtureRequest, world: World) -> dict[str, Any]:
    return world.played(request.param)


def assert_equal_to(world: World, results: list[SampleResult], samples: list[dict[str, Any]], each: int) -> None:
    assert [sample["index"] for sample in samples] == list(range(PROMPTS * each))
    for sample in samples:
        prompt, (tokens, logprobs) = world.prompts[sample["index"] // each], turn_of(results[sample["index"] // each])
        assert sample["tokens"] == [*prompt, *tokens]
        assert sample["log_probs"] == pytest.approx(logprobs, abs=0.02)
        assert (sample["response_length"], sample["weight_versions"]) == (len(tokens), ["0"])


def test_greedy_samples_and_their_log_probabilities_are_those_of_rollouts(world: World, rounds: dict[str, Any]) -> None:
    [played] = rounds["greedy"]
    assert_equal_to(world, world.greedy, played["samples"], each=2)
    assert played["left"] == []


def test_samples_of_a_seed_are_those_of_rollouts_with_it(world: World, rounds: dict[str, Any]) -> None:
    [played] = rounds["seeded"]
    assert_equal_to(world, world.seeded, played["samples"], each=1)
    assert [turn_of(one)[0] for one in world.seeded] != [turn_of(one)[0] for one in world.greedy]


def test_streams_of_slime_and_scores_of_miles_say_the_same(world: World, rounds: dict[str, Any]) -> None:
    [played] = rounds["further"]
    assert_equal_to(world, world.greedy, played["samples"], each=2)
    if rounds["trainer"] == "miles":
        for sample in played["samples"]:
            scored = world.scores[sample["index"] // 2].logprobs[-sample["response_length"] :]
            assert sample["log_probs"] == pytest.approx(scored, abs=0.02)


def test_samples_that_were_cut_off_come_back_with_their_tokens_and_go_on(rounds: dict[str, Any]) -> None:
    wait_until_idle()
    assert [len(played["samples"]) for played in rounds["cut"]] == [1, 1, 1]
    known: dict[int, list[int]] = {}
    aborted = 0
    for played in rounds["cut"]:
        for sample in [*played["samples"], *played["left"]]:
            before = known.get(sample["index"], [])
            assert sample["tokens"][: len(before)] == before
            assert len(sample["log_probs"]) == sample["response_length"]
            known[sample["index"]] = sample["tokens"]
            aborted += sample["status"] == "aborted" and sample["response_length"] > 0
    assert aborted

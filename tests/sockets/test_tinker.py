"""Tinker's own client and tinker-cookbook against the running service, beside `/rollout` and `/score`.

`python -m requirements.beside tinker` installs both. `tinker_program.py` calls them, here is what must have come.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollout_client import RolloutClient, Sampling
from rollout_client.contract.rollouts import SampleResult
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.live.forward_pass import adapter_folder
from tests.live.running_service import replicas
from tests.paths import REPOSITORY, TINY_MODEL

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("tinker_program.py")
PYTHON = Path(os.environ["ROLLOUT_TINKER"], "bin", "python")
LONG, BEGUN = "LONG", "begun"
GREEDY = Sampling(greedy=True)
MOST_AT_ONCE = 40
"""Rollouts; the program asks for 200 at once, and is told to come again."""
PATHS = ("tinker://run-a", "tinker://run-a/1", "tinker://run-a/sampler_weights/1", "tinker://0")
Turn = tuple[list[int], list[int], list[float]]


def turn_of(result: SampleResult) -> Turn:
    """Prompt and response of a rollout of one turn, and the log-probabilities of the response."""
    asked, answered, *_ = result.message_log
    assert answered.generation_logprobs is not None
    return asked.token_ids, answered.token_ids, answered.generation_logprobs


def started(url: str, asked: str, results: Path) -> "subprocess.Popen[str]":
    env = os.environ | {"TINKER_BASE_URL": url, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command: list[str | Path] = [PYTHON, PROGRAM, url, TINY_MODEL, asked, results]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def finish(program: "subprocess.Popen[str]") -> None:
    """Returns when it has ended as it should."""
    out, err = program.communicate()
    assert program.returncode == 0, out[-2000:] + err[-6000:]


class World:
    """What the service says to its own client, and what it says to Tinker's."""

    def __init__(self, folder: Path, url: str) -> None:
        with RolloutClient(url) as client:
            adapter = folder / "adapter"
            adapter_folder(adapter, seed=3)
            client.push_weights(adapter, kind="adapter", name="run-a", version=1)
            samples = client.example_samples("math", count=8)
            self.own = [turn_of(each) for each in client.rollout(samples, sampling=GREEDY).samples]
            named = client.rollout(samples, sampling=GREEDY, policy={"name": "run-a"}).samples
            self.own_of_adapter = [turn_of(each) for each in named]
            self.prompts = [prompt for prompt, _, _ in self.own]
            self.scores = client.score(self.prompts, top_k=3, policy={"version": 0}).scores
            asked, results = folder / "asked.json", folder / "results.json"
            asked.write_text(json.dumps({"prompts": self.prompts, "paths": PATHS}))
            finish(started(url, str(asked), results))
            self.results: dict[str, Any] = json.loads(results.read_text())
            self.folder, self.url = folder, url
            self.client = self.results["client"]
            self.cookbook = self.results["cookbook"]
            actions = [[*prompt, *tokens] for prompt, tokens, _ in self.cookbook["actions"]]
            self.scores_of_actions = client.score(actions).scores


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tinker")
    config = read_config(REPOSITORY / "serve_config.cpu.yaml", port=free_port())
    [application] = config.applications
    application.args["engine"] |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "num_cpus": 0.4}
    application.args["policy"] = {"checkpoint_roots": [str(folder)]}
    application.args["admission"] = {"max_rollouts": MOST_AT_ONCE}
    [ingress] = [deployment for deployment in application.deployments if deployment.name == "Ingress"]
    ingress.num_replicas = 2
    with local_service(config, Console(stderr=True)) as url:
        yield World(folder, url)


def test_the_model_is_offered_for_sampling_alone(world: World) -> None:
    expected = {"model_name": "tiny", "max_context_length": 4096, "trainable": False, "sampleable": True}
    assert world.results["capabilities"] == [expected]


def test_greedy_samples_and_their_log_probabilities_are_those_of_rollouts(world: World) -> None:
    for (_, tokens, logprobs), (sampled, said, reason) in zip(world.own, world.client["greedy"], strict=True):
        assert (sampled, reason) == (tokens, "stop")
        assert said == pytest.approx(logprobs, abs=0.02)


def test_a_path_names_an_adapter_or_a_version(world: World) -> None:
    adapted = [tokens for _, tokens, _ in world.own_of_adapter]
    plain = [tokens for _, tokens, _ in world.own]
    assert adapted != plain
    expected = dict.fromkeys(PATHS[:3], adapted) | {PATHS[3]: plain}
    assert {path: [tokens for tokens, _, _ in said] for path, said in world.client["named"].items()} == expected


def test_log_probabilities_of_prompts_are_those_of_score(world: World) -> None:
    for said, score in zip(world.client["logprobs"], world.scores, strict=True):
        assert score.logprobs is not None
        assert said[0] is score.logprobs[0] is None
        assert said[1:] == pytest.approx(score.logprobs[1:], abs=0.02)
    first = world.client["logprobs"][0]
    assert world.client["last"] == [None] * (len(first) - 4) + [pytest.approx(each, abs=0.02) for each in first[-4:]]
    assert world.client["single"] == [None]
    assert world.client["prompt_logprobs"][1:] == pytest.approx(first[1:], abs=0.02)


def test_the_most_likely_tokens_are_those_of_score(world: World) -> None:
    score, said = world.scores[0], world.client["top_prompt_logprobs"]
    assert score.top_token_ids is not None
    assert score.top_logprobs is not None
    assert said[0] is score.top_token_ids[0] is None
    for row, ids, logprobs in zip(said[1:], score.top_token_ids[1:], score.top_logprobs[1:], strict=True):
        assert ids is not None
        assert logprobs is not None
        assert [logprob for _, logprob in row] == pytest.approx(logprobs, abs=0.02)
    for tokens, logprobs, rows in world.client["top_logprobs"]:
        assert [len(row) for row in rows] == [2] * len(tokens)
        for token, logprob, row in zip(tokens, logprobs, rows, strict=True):
            assert row[0][1] >= row[1][1]
            assert token not in dict(row) or dict(row)[token] == logprob


def test_a_seed_repeats_samples_that_differ_among_each_other(world: World) -> None:
    first, again, other = ([tokens for tokens, _, _ in said] for said in world.client["seeded"])
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) > 1


def test_stops_are_texts_ids_the_models_own_or_none(world: World) -> None:
    own, text, texts, ids, endless = world.client["stopped"]
    whole = world.client["greedy"][0][0]
    assert own[0] == whole == text[0] + whole[len(text[0]) :]
    assert (len(text[0]), texts[0], ids[0]) == (5, whole[:7], whole[:7])
    assert [said[2] for said in (own, text, texts, ids, endless)] == ["stop"] * 4 + ["length"]
    assert len(endless[0]) == 30


def test_clients_in_other_processes_sample_from_the_same_sampler(world: World) -> None:
    assert world.client["cloned"][0] == world.client["pickled"][0] == world.client["greedy"][0][0]


def test_more_samples_than_are_admitted_all_come_each_once(world: World) -> None:
    owners = 2
    assert world.client["many"] == [200, 200, owners]


def test_what_is_not_here_is_refused_at_once_in_a_sentence(world: World) -> None:
    refused = world.client["refused"]
    assert {name: kind for name, (kind, _, _) in refused.items()} == {
        "training": "NotFoundError",
        "model": "UnprocessableEntityError",
        "path": "UnprocessableEntityError",
        "policy": "UnprocessableEntityError",
        "token": "UnprocessableEntityError",
        "temperature": "RequestFailedError",
        "runs": "NotFoundError",
    }
    assert "create_model is not here: this service samples and does not train." in refused["training"][1]
    assert "temperature must be in [0, 2], got 3.0" in refused["temperature"][1]
    assert max(seconds for _, _, seconds in refused.values()) < 10


def test_a_cancelled_sample_holds_nothing(world: World) -> None:
    """The rest of the program, and the scores after it, were admitted beside it."""
    assert world.client["cancelled"]


def test_a_benchmark_of_the_cookbook_gives_the_score_of_the_policy(world: World) -> None:
    score, examples, correct, errors = world.cookbook["benchmark"]
    assert (examples, errors, score) == (4, 0, correct / 4)
    assert score >= 0.5


def test_a_recipe_of_the_cookbook_plays_its_rollouts(world: World) -> None:
    rewards = world.cookbook["rewards"]
    assert [len(group) for group in rewards] == [4] * 4
    assert {round(reward, 1) for group in rewards for reward in group} <= {-0.1, 0.0, 0.9, 1.0}
    assert max(max(group) for group in rewards) == 1.0
    assert world.cookbook["evaluated"]["test/env/all/total_episodes"] == 16


def test_log_probabilities_of_a_recipes_actions_are_those_of_score(world: World) -> None:
    differences = []
    for (prompt, _, said), score in zip(world.cookbook["actions"], world.scores_of_actions, strict=True):
        assert score.logprobs is not None
        differences += [abs(one - (other or 0)) for one, other in zip(said, score.logprobs[len(prompt) :], strict=True)]
    assert len(differences) > 100
    assert sum(differences) / len(differences) < 0.02


def test_samples_of_an_ingress_replica_that_is_killed_are_made_anew(world: World) -> None:
    results = world.folder / "long.json"
    program = started(world.url, LONG, results)
    assert program.stdout is not None
    assert program.stdout.readline().strip() == BEGUN
    before = replicas("Ingress")
    assert len(before) == 2
    before[0].kill()
    finish(program)
    found = json.loads(results.read_text())
    assert found["lengths"] == [400] * 24

"""verifiers plays a taskset against sessions of a running service, by its own client in its own Python environment."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from examples.task_configs import config_for
from examples.train_agent import verifiers_harness
from rollout_client import RolloutClient, Sampling
from rollout_client.contract.rollouts import SampleResult
from service.startup.local_service import local_service
from tests.paths import REPOSITORY, SMALL_MODEL

QUESTION = re.compile(
    r"Answer in JSON with the key (\w+): (.+) is (\d+) years old, lives in (\w+) and has (\d+) points\."
)
GENERATIONS = 8
TASKS = 4


@pytest.fixture(scope="module")
def client() -> Iterator[RolloutClient]:
    with verifiers_harness() as harness:
        config = config_for(REPOSITORY / "serve_config.cpu.yaml", SMALL_MODEL, ("math",))
        config.applications[0].args["sessions"] = {}
        config.applications[0].args["environments"]["facts"] = {
            "agent": {"harness": {"url": harness}, "scored_by": "agent"}
        }
        with local_service(config, Console(stderr=True)) as url, RolloutClient(url) as rollout_client:
            yield rollout_client


def played(client: RolloutClient, *indexes: int) -> list[SampleResult]:
    samples = [{"task_name": "facts", "extra_env_info": {"index": index}} for index in indexes]
    sampling = Sampling(temperature=1.0, max_new_tokens=64)
    return client.rollout(samples, num_generations=GENERATIONS, sampling=sampling).samples


def right(rollout: SampleResult) -> float:
    """The reward of the taskset, from the texts that the service has recorded."""
    question, answer = rollout.message_log
    found = QUESTION.fullmatch(question.content)
    assert found is not None
    key, name, age, city, score = found.groups()
    expected: dict[str, Any] = {"name": name, "age": int(age), "city": city, "score": int(score)}
    try:
        return float(json.loads(answer.content.removeprefix("<think></think>")) == {key: expected[key]})
    except ValueError:
        return 0.0


def test_rollouts_have_the_tokens_that_verifiers_has_rewarded(client: RolloutClient) -> None:
    rollouts = played(client, *range(TASKS))
    assert len(rollouts) == TASKS * GENERATIONS
    assert len({rollout.message_log[0].content for rollout in rollouts}) == TASKS
    for rollout in rollouts:
        assert (rollout.status, rollout.error) == ("completed", None)
        assert rollout.rewards == {"right": right(rollout)}
        question, answer = rollout.message_log
        assert question.generation_logprobs is None
        assert answer.generation_logprobs is not None
        assert len(answer.generation_logprobs) == len(answer.token_ids) > 0
    assert {rollout.total_reward for rollout in rollouts} == {0.0, 1.0}

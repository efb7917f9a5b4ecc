"""A harness behind HTTP plays Harbor's tasks on a running service, in the sandboxes of its rollouts."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from examples.task_configs import config_for
from rollout_client import RolloutClient, Sampling
from service.startup.local_service import local_service
from tests.deployments.agents.harbor_rollouts import TASKS, reward_of, sample_of
from tests.deployments.agents.test_harbor_program import works
from tests.deployments.agents.test_sandbox_endpoint import harness
from tests.paths import REPOSITORY, SMALL_MODEL

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine"),
]
ROLLOUTS = 12


def work(call: dict[str, Any]) -> None:
    """Asks the model, then does in the sandbox what the sample says."""
    headers = {"authorization": f"Bearer {call['api_key']}"}
    question = {"messages": call["sample"]["messages"]}
    httpx.post(f"{call['base_url']}/v1/chat/completions", json=question, headers=headers, timeout=60).raise_for_status()
    argv = ["bash", "-c", call["sample"]["extra_env_info"]["script"]]
    assert httpx.post(f"{call['sandbox']}/exec", json={"argv": argv}, timeout=60).json()["exit_code"] == 0


@pytest.fixture(scope="module")
def client() -> Iterator[RolloutClient]:
    with harness(work) as url:
        config = config_for(REPOSITORY / "serve_config.cpu.yaml", SMALL_MODEL, ("math",))
        config.applications[0].args["sessions"] = {}
        agent = {"harbor": {"tasks": str(TASKS)}, "harness": {"url": url}}
        config.applications[0].args["environments"]["tasks"] = {"agent": agent}
        with local_service(config, Console(stderr=True)) as address, RolloutClient(address) as connected:
            yield connected


def test_the_verifier_rewards_what_a_harness_did_in_the_sandbox(client: RolloutClient) -> None:
    samples = [sample_of(number) for number in range(ROLLOUTS)]
    response = client.rollout(samples, sampling=Sampling(greedy=True, max_new_tokens=8))
    assert [(result.status, result.rewards, result.error) for result in response.samples] == [
        ("completed", {"reward": reward_of(number)}, None) for number in range(ROLLOUTS)
    ]
    assert {len(result.message_log) for result in response.samples} == {2}

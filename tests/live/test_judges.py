"""A judge behind a socket and a reward model in its deployment, on a simulated engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.models.reward_replica import _ClassificationModel
from deployments.models.settings import RewardModelSettings
from examples.reward_model import write_reward_model
from rollout_client import RolloutClient
from tests.deployments.models.chat_server import Answer, ChatServer, chat_server, said
from tests.live.services import RUNNING, simulated_config

TASKS = "deployments.tasks"
QUESTION = [{"role": "user", "content": "Q"}]
pytestmark = pytest.mark.long


def judged(_: int, body: dict[str, Any]) -> Answer:
    """Scores each reply with 9, unless the reply was to a question that makes the judge break."""
    if "Break." in body["messages"][0]["content"]:
        return Answer(status=503)
    return said('It is fine. {"score": 9, "reason": "Fine."}')


@pytest.fixture(scope="module")
def judge() -> Iterator[ChatServer]:
    with chat_server(judged) as server:
        yield server


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_model")
    write_reward_model(folder, hidden_size=32, layers=2)
    return folder


@pytest.fixture(scope="module")
def client(judge: ChatServer, reward_model: Path) -> Iterator[RolloutClient]:
    asked = {"base_url": judge.url, "model": "m", "retries": 1, "api_key_variable": "LIVE_JUDGE_KEY"}
    config = simulated_config(
        {
            "style": {"import_path": f"{TASKS}.llm_judge:LlmJudgeEnvironment", "models": {"judge": asked}},
            "chat": {"import_path": f"{TASKS}.reward_model:RewardModelEnvironment", "reward_models": ["helpful"]},
        },
        reward_models={"helpful": {"model": str(reward_model)}},
    )
    with RolloutClient(RUNNING.url("judged", lambda: config, LIVE_JUDGE_KEY="k3y")) as rollout_client:
        yield rollout_client


def test_a_judge_behind_a_socket_gives_the_rewards(client: RolloutClient, judge: ChatServer) -> None:
    sample = {"task_name": "style", "messages": QUESTION}
    answer = client.rollout([sample], num_generations=8, sampling={"max_new_tokens": 4})
    assert [each.rewards for each in answer.samples] == [{"judge": 0.9}] * 8
    assert all(headers["authorization"] == "Bearer k3y" for headers in judge.headers)
    assert answer.metrics["environment/judge_calls/max"] == 1


def test_a_judge_that_does_not_answer_costs_its_own_samples_only(client: RolloutClient) -> None:
    texts = ("Q", "Break.")
    samples = [{"task_name": "style", "messages": [{"role": "user", "content": text}]} for text in texts]
    answer = client.rollout(samples, sampling={"max_new_tokens": 4}, sample_retries=1)
    fine, broken = answer.samples
    assert fine.status == "completed"
    assert broken.error is not None
    assert (broken.error.kind, broken.error.retryable) == ("environment", True)
    assert "The model judge did not answer (attempts: 2): status 503." in broken.error.message


def test_scores_of_a_reward_models_deployment_are_those_of_it(client: RolloutClient, reward_model: Path) -> None:
    sample = {"task_name": "chat", "messages": QUESTION}
    answer = client.rollout([sample], num_generations=16, sampling={"max_new_tokens": 8})
    model = _ClassificationModel(RewardModelSettings(model=str(reward_model)))
    for each in answer.samples:
        log = [{"role": message.role, "content": message.content} for message in each.message_log[:2]]
        [expected] = model.scores([model.tokens(log)])  # type: ignore[arg-type]
        assert each.rewards["score"] == pytest.approx(expected, abs=1e-4)

"""Parsed responses, tools, a judge behind a socket and a reward model in its deployment, on a simulated engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema
from rich.console import Console
from transformers import AutoTokenizer

from deployments.models.reward_replica import _ClassificationModel
from deployments.models.settings import RewardModelSettings
from examples.reward_model import write_reward_model
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import RolloutResponse
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.deployments.models.chat_server import Answer, ChatServer, chat_server, said
from tests.paths import REPOSITORY, TINY_MODEL

TASKS = "deployments.tasks"
TOKENIZER: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
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
    config = read_config(REPOSITORY / "serve_config.scale.yaml", port=free_port())
    [application] = config.applications
    judge_settings = {"base_url": judge.url, "model": "m", "retries": 1, "api_key_variable": "LIVE_JUDGE_KEY"}
    application.args |= {
        "responses": {"tool_call_parser": "hermes"},
        "reward_models": {"helpful": {"model": str(reward_model)}},
        "environments": {
            "tool_calls": {"import_path": f"{TASKS}.tool_calls:ToolCallsEnvironment"},
            "retrieval": {"import_path": f"{TASKS}.retrieval:RetrievalEnvironment"},
            "style": {
                "import_path": f"{TASKS}.llm_judge:LlmJudgeEnvironment",
                "models": {"judge": judge_settings},
            },
            "chat": {"import_path": f"{TASKS}.reward_model:RewardModelEnvironment", "reward_models": ["helpful"]},
        },
    }
    application.args["engine"]["simulated"] |= {"time_to_first_token_s": 0.0, "time_per_token_s": 0.0}
    application.deployments = [
        DeploymentSchema(name=name, num_replicas=1, ray_actor_options=RayActorOptionsSchema(num_cpus=0.1))
        for name in ("Ingress", "Generator")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIVE_JUDGE_KEY", "k3y")
        with local_service(config, Console(stderr=True)) as url, RolloutClient(url) as rollout_client:
            yield rollout_client


def stepped(client: RolloutClient, task_name: str, response: str, extra_env_info: dict[str, Any]) -> RolloutResponse:
    """Posts a log that ends with a response, which is parsed and stepped first; then the rollout has had its turn."""

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text, "token_ids": TOKENIZER.encode(text, add_special_tokens=False)}

    answer = message("assistant", response)
    answer |= {"generation_logprobs": [0.0] * len(answer["token_ids"]), "finish_reason": "stop"}
    sample = {
        "task_name": task_name,
        "message_log": [message("user", "Q"), answer],
        "extra_env_info": extra_env_info,
    }
    return client.rollout([sample], max_rollout_turns=1)


def test_calls_are_parsed_shown_and_answered_and_the_tokens_stay(client: RolloutClient) -> None:
    call = '{"name": "calculator", "arguments": {"expression": "6 * 7"}}'
    text = f"I compute. <tool_call>{call}</tool_call>"
    answer = stepped(client, "tool_calls", text, {"ground_truth": "42"})
    [sample] = answer.samples
    response, result = sample.message_log[1:]
    assert response.tool_calls == [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "calculator", "arguments": '{"expression": "6 * 7"}'},
        }
    ]
    assert (response.content, response.parsed_content) == (text, "I compute. ")
    assert response.token_ids == TOKENIZER.encode(text, add_special_tokens=False)
    assert (result.role, result.content, result.tool_call_id, result.name) == ("tool", "42", "call00000", "calculator")
    assert sample.metrics.environment == {"calls": 1, "malformed_calls": 0}


def test_a_malformed_call_is_shown_counted_and_answered(client: RolloutClient) -> None:
    answer = stepped(client, "tool_calls", '<tool_call>{"name": </tool_call>', {"ground_truth": "42"})
    [sample] = answer.samples
    assert sample.message_log[1].parse_error is not None
    assert sample.message_log[1].parse_error.startswith("JSONDecodeError: ")
    assert sample.message_log[2].content.startswith("Error: The call is not valid JSON")
    assert sample.metrics.parse_errors == 1
    assert answer.metrics["total_parse_errors"] == 1
    assert answer.metrics["environment/malformed_calls/mean"] == 1


def test_a_search_finds_documents(client: RolloutClient) -> None:
    [example] = client.example_samples("retrieval", count=1)
    relevant: Any = example.extra_env_info["relevant"]
    subject = str(example.messages[0].content) if example.messages else ""
    call = f'<tool_call>{{"name": "search", "arguments": {{"query": "{subject}"}}}}</tool_call>'
    [sample] = stepped(client, "retrieval", call, example.extra_env_info).samples
    assert f"[{relevant[0]}]" in sample.message_log[2].content
    assert sample.metrics.environment["searches"] == 1


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


def test_scores_of_the_reward_models_deployment_are_those_of_the_model(
    client: RolloutClient, reward_model: Path
) -> None:
    sample = {"task_name": "chat", "messages": QUESTION}
    answer = client.rollout([sample], num_generations=16, sampling={"max_new_tokens": 8})
    model = _ClassificationModel(RewardModelSettings(model=str(reward_model)))
    for each in answer.samples:
        log = [{"role": message.role, "content": message.content} for message in each.message_log[:2]]
        [expected] = model.scores([model.tokens(log)])  # type: ignore[arg-type]
        assert each.rewards["score"] == pytest.approx(expected, abs=1e-4)

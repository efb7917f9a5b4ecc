"""The whole service for real: HTTP, Ray Serve, vLLM and the embedded model, the real environments."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.reference_model import token_ids_of
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import RolloutResponse, SampleInput, Sampling
from rollout_client.results import resumed
from rollout_env.__main__ import main as certify_command
from tests.live.forward_pass import float32_model_of, logprob_differences, tiny_state
from tests.live.played_with_weights import SAME_WEIGHTS_TOLERANCE, generated, tokens_of
from tests.paths import TINY_MODEL

TEMPERATURE = 0.8
PROMPT = [{"role": "user", "content": "What is 20 + 22?"}]
tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)


def test_info_describes_the_engine_and_the_tokenizer_is_that_of_the_model(client: RolloutClient) -> None:
    info = client.info()
    assert (info.model.vocab_size, info.model.max_model_len, info.limits["max_seq_len"]) == (262, 4096, 4096)
    assert info.versions.engine.startswith("vllm 0.")
    assert {"math", "sliding_puzzle"} < set(info.tasks)
    client.check_tokenizer(tokenizer)


def test_a_task_is_certified_by_its_replica(service_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for task, verdict in (("math", "math passes."), ("sliding_puzzle", "sliding_puzzle passes.")):
        certify_command(["certify", task, "--url", service_url, "--samples", "1"])
        assert capsys.readouterr().out.splitlines()[-1].startswith(verdict)
    with pytest.raises(SystemExit, match="there is no task 'none'"):
        certify_command(["certify", "none", "--url", service_url])
    with pytest.raises(SystemExit, match=r"settings\.samples: Input should be greater than or equal to 1"):
        certify_command(["certify", "math", "--url", service_url, "--samples", "0"])


@pytest.fixture(scope="module")
def mixed_samples(client: RolloutClient) -> list[SampleInput]:
    return [*client.example_samples("math", 8, seed=1), *client.example_samples("sliding_puzzle", 8, seed=1)]


@pytest.fixture(scope="module")
def mixed(client: RolloutClient, mixed_samples: list[SampleInput]) -> RolloutResponse:
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=48, seed=7)
    return client.rollout(mixed_samples, num_generations=2, sampling=sampling, max_rollout_turns=6)


def test_results_come_back_in_input_order_with_their_groups_together(mixed: RolloutResponse) -> None:
    assert [(result.idx, result.generation_index) for result in mixed.samples] == [
        (idx, generation) for idx in range(16) for generation in range(2)
    ]
    assert [result.task_name for result in mixed.samples] == ["math"] * 16 + ["sliding_puzzle"] * 16
    assert all(result.error is None for result in mixed.samples)


def test_log_probabilities_are_those_of_a_forward_pass_over_the_same_ids(mixed: RolloutResponse) -> None:
    [version] = {span.version for one in mixed.samples for m in generated(one) for span in m.weight_versions or ()}
    differences = logprob_differences(mixed.samples, {version: float32_model_of(tiny_state())}, TEMPERATURE)[version]
    assert len(differences) > 500
    assert differences.mean().item() <= SAME_WEIGHTS_TOLERANCE


def test_a_log_decodes_to_the_templates_rendering_of_the_conversation(mixed: RolloutResponse) -> None:
    for result in mixed.samples:
        if any(message.finish_reason == "length" for message in generated(result)):
            continue
        chat = [{"role": message.role, "content": message.content} for message in result.message_log]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(token_ids_of(result)) == rendered


def test_a_game_that_is_cut_and_posted_back_ends_as_the_uncut_one(client: RolloutClient) -> None:
    greedy = Sampling(greedy=True, max_new_tokens=48)
    games = client.example_samples("sliding_puzzle", 8, seed=5)
    whole = client.rollout(games, sampling=greedy, max_rollout_turns=6).samples
    cut = client.rollout(games, sampling=greedy, max_rollout_turns=2).samples
    unfinished = [game for game in cut if game.status == "max_turns"]
    assert unfinished, "games must take several turns for this test to say anything"
    again = client.rollout([resumed(game) for game in unfinished], sampling=greedy, max_rollout_turns=6).samples
    for game in again:
        assert tokens_of(game) == tokens_of(whole[game.idx])
        assert (game.status, game.extra_env_info) == (whole[game.idx].status, whole[game.idx].extra_env_info)


def test_equal_seeds_repeat_a_request_and_the_rollouts_of_a_group_differ(client: RolloutClient) -> None:
    def ids(seed: int) -> list[list[int]]:
        sampling = Sampling(temperature=2.0, max_new_tokens=24, seed=seed)
        samples = [{"task_name": "math", "messages": PROMPT}] * 2
        infos = [{**sample, "extra_env_info": {"ground_truth": "42"}} for sample in samples]
        response = client.rollout(infos, num_generations=3, sampling=sampling)
        return [generated(result)[0].token_ids for result in response.samples]

    first = ids(seed=1)
    assert ids(seed=1) == first
    assert len({tuple(token_ids) for token_ids in first}) == 6
    assert ids(seed=2) != first


@pytest.mark.parametrize("stop_strings", [["}"], ["never", "boxed"]])
def test_a_stop_string_ends_the_generation_and_stays_in_it(client: RolloutClient, stop_strings: list[str]) -> None:
    sample = {"task_name": "math", "messages": PROMPT, "extra_env_info": {"ground_truth": "42"}}
    sampling = Sampling(greedy=True, max_new_tokens=32, stop_strings=stop_strings)
    message = generated(client.rollout([sample], sampling=sampling).samples[0])[0]
    assert message.finish_reason == "stop"
    assert message.content.endswith(stop_strings[-1])
    assert tokenizer.decode(message.token_ids, skip_special_tokens=True) == message.content
    assert len(message.generation_logprobs or []) == len(message.token_ids)


def test_seeded_generations_of_long_prompts_side_by_side_all_end(client: RolloutClient) -> None:
    samples = [
        {
            "task_name": "math",
            "messages": [{"role": "user", "content": f"{number}" * 3000}],
            "extra_env_info": {"ground_truth": "42"},
        }
        for number in range(6)
    ]
    response = client.rollout(samples, sampling=Sampling(max_new_tokens=2, seed=1))
    assert [result.status for result in response.samples] == ["completed"] * 6


def test_a_sample_that_only_its_step_can_refuse_fails_alone(client: RolloutClient) -> None:
    good, unreadable = (
        {"task_name": "math", "messages": PROMPT, "extra_env_info": {"ground_truth": truth}} for truth in ("42", "}{")
    )
    response = client.rollout([good, unreadable], sampling=Sampling(max_new_tokens=16))
    assert [result.status for result in response.samples] == ["completed", "error"]
    error = response.samples[1].error
    assert error is not None
    assert (error.kind, error.retryable) == ("environment", False)
    assert error.message == "extra_env_info.ground_truth is not a mathematical expression: '}{'"
    assert response.metrics["total_turns"] == 1


@pytest.mark.long
def test_the_embedded_model_is_neither_hopeless_nor_perfect(client: RolloutClient) -> None:
    def solved(task_name: str, count: int) -> float:
        samples = client.example_samples(task_name, count, seed=123)
        results = client.rollout(samples, sampling=Sampling(max_new_tokens=32, seed=0), max_rollout_turns=20).samples
        return sum(result.total_reward or 0.0 for result in results) / count

    assert 0.40 <= solved("math", 500) <= 0.75
    assert 0.20 <= solved("sliding_puzzle", 50) <= 0.95


def test_the_tasks_examples_can_be_posted_as_they_are(client: RolloutClient) -> None:
    tasks = client.tasks()
    assert sorted(task.task_name for task in tasks) == ["following", "math", "sliding_puzzle"]
    response = client.rollout([task.example for task in tasks], sampling=Sampling(max_new_tokens=32))
    assert all(result.error is None for result in response.samples)

"""Everything a rollout is, on the real engine: stop strings, limits, schedules, cuts, and what comes back of them."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rollout_client import RolloutClient
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import Keep, SampleInput, SampleResult, Sampling
from rollout_client.results import resumed
from rollout_client.trainers.nemo_rl import ServiceOptions, run_async_multi_turn_rollout
from tests.growing_limits import in_the_middle
from tests.live.following_environment import QUESTION, following
from tests.live.running_service import ongoing_generations, wait_until_idle
from tests.paths import TINY_MODEL

tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
END = tokenizer.convert_tokens_to_ids("<|end|>")
GREEDY = Sampling(greedy=True, max_new_tokens=32)


def given(role: str, text: str) -> dict[str, Any]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"role": role, "content": text, "token_ids": ids}


def generated(result: SampleResult) -> list[Message]:
    return [message for message in result.message_log if message.generation_logprobs is not None]


def length(result: SampleResult) -> int:
    return sum(len(message.token_ids) for message in result.message_log)


def tokens_of(result: SampleResult) -> list[tuple[str, str, list[int]]]:
    return [(message.role, message.content, message.token_ids) for message in result.message_log]


def play_one(client: RolloutClient, sample: dict[str, Any], **options: Any) -> SampleResult:
    [result] = client.rollout([sample], **{"sampling": GREEDY, **options}).samples
    assert result.error is None, result.error
    return result


def test_a_generation_of_nothing_but_its_end_is_an_empty_message(client: RolloutClient) -> None:
    prefix = f"<|user|>\n{QUESTION}<|end|>\n<|assistant|>\n\\boxed{{42}}"
    result = play_one(client, following({}, message_log=[given("user", prefix)]))
    assert (generated(result)[0].content, generated(result)[0].token_ids) == ("", [END])


def test_special_tokens_and_broken_characters_stay_in_ids_and_leave_the_text(client: RolloutClient) -> None:
    sampling = Sampling(temperature=2.0, max_new_tokens=64, seed=3)
    results = client.rollout([following({})] * 64, sampling=sampling).samples
    messages = [message for result in results for message in generated(result)]
    special = set(tokenizer.all_special_ids)
    assert any(special & set(message.token_ids[:-1]) for message in messages), "no special token was sampled"
    assert any("\ufffd" in message.content for message in messages), "no broken character was sampled"
    for message in messages:
        assert message.content == tokenizer.decode(message.token_ids, skip_special_tokens=True)
        assert not any(token in message.content for token in tokenizer.all_special_tokens)


def test_characters_that_are_split_across_tokens_come_through_whole(client: RolloutClient) -> None:
    text = "né 漢字 🙂"
    result = play_one(client, following({"observation": text}, messages=[{"role": "user", "content": text}]))
    assert (result.message_log[0].content, result.message_log[2].content) == (text, text)
    assert text in tokenizer.decode(result.message_log[2].token_ids)


@pytest.mark.parametrize("observation_format", ["raw", "chat"])
def test_a_zero_length_observation_is_taken_as_it_is(client: RolloutClient, observation_format: str) -> None:
    sample = following({}, {}, observation_format=observation_format)
    result = play_one(client, sample)
    bridge = [] if observation_format == "raw" else tokenizer("\n<|user|>\n<|end|>\n<|assistant|>\n")["input_ids"]
    assert [message.content for message in result.message_log if message.role == "user"][1:] == ["", ""]
    assert result.message_log[2].token_ids == bridge


def test_fifty_turns_are_played_to_the_end(client: RolloutClient) -> None:
    turns: list[dict[str, Any]] = [{"observation": f"{turn}", "reward": 0.5} for turn in range(50)]
    sampling = Sampling(greedy=True, max_new_tokens=4)
    result = play_one(client, following(*turns), sampling=sampling, max_rollout_turns=50)
    assert (result.status, result.metrics.turn_count, result.total_reward) == ("completed", 50, 25.0)
    assert [message.content for message in result.message_log[2::2]] == [f"{turn}" for turn in range(50)]
    assert result.extra_env_info["turn"] == 50


@pytest.mark.parametrize(
    ("room", "status", "generated_tokens", "env_tokens"),
    [(0, "truncated", [], 0), (5, "truncated", [5], 0), (11, "truncated", [11], 0), (16, "truncated", [11], 5)],
    ids=["in the prompt", "in the generation", "at its last token", "in the observation"],
)
def test_max_seq_len_is_never_passed_wherever_it_is_reached(
    client: RolloutClient, room: int, status: str, generated_tokens: list[int], env_tokens: int
) -> None:
    whole = play_one(client, following({"observation": "A long answer."}, {}))
    prompt_tokens = len(whole.message_log[0].token_ids)
    assert len(generated(whole)[0].token_ids) == 11
    result = play_one(client, following({"observation": "A long answer."}, {}), max_seq_len=prompt_tokens + room)
    assert (result.status, result.metrics.turn_gen_tokens, result.metrics.env_tokens) == (
        status,
        generated_tokens,
        env_tokens,
    )
    assert length(result) == prompt_tokens + room


def test_both_schedules_give_the_same_logs_and_rewards(client: RolloutClient) -> None:
    samples = [*client.example_samples("sliding_puzzle", 8, seed=2), *client.example_samples("math", 8, seed=2)]
    free = client.rollout(samples, sampling=GREEDY, max_rollout_turns=6).samples
    in_step = client.rollout(samples, sampling=GREEDY, max_rollout_turns=6, schedule="lockstep").samples
    assert [tokens_of(result) for result in in_step] == [tokens_of(result) for result in free]
    assert [result.total_reward for result in in_step] == [result.total_reward for result in free]


def test_a_deadline_cuts_what_still_runs_and_its_log_goes_on_where_it_was_cut(client: RolloutClient) -> None:
    short = [following({"observation": "."})] * 2
    long = [following(*[{"observation": f"{turn}"} for turn in range(40)], idx=7)] * 2
    options: dict[str, Any] = {"sampling": GREEDY, "max_rollout_turns": 40}
    whole = client.rollout(long, **options).samples

    def attempt(deadline_s: float) -> list[SampleResult]:
        return client.rollout(short + long, deadline_s=deadline_s, **options).samples

    def have_begun(results: list[SampleResult]) -> bool:
        return all(result.metrics.turn_count for result in results) and results[0].status == "completed"

    cut = in_the_middle(attempt, have_begun)
    assert [result.status for result in cut] == ["completed", "completed", "deadline", "deadline"]
    assert all(1 <= result.metrics.turn_count < 40 for result in cut[2:])
    again = client.rollout([resumed(result) for result in cut[2:]], **options).samples
    assert [tokens_of(result) for result in again] == [tokens_of(result) for result in whole]
    assert [(result.status, result.idx) for result in again] == [("completed", 7)] * 2


def test_a_deadline_in_the_middle_of_a_message_keeps_its_tokens_and_the_message_goes_on(client: RolloutClient) -> None:
    sample = following({"observation": "."})
    sampling = Sampling(greedy=True, ignore_eos=True, max_new_tokens=900)
    whole = play_one(client, sample, sampling=sampling)
    cut = in_the_middle(
        lambda deadline_s: play_one(client, sample, sampling=sampling, deadline_s=deadline_s),
        has_begun=lambda result: any(message.token_ids for message in generated(result)),
    )
    [begun] = generated(cut)
    assert (cut.status, begun.finish_reason) == ("deadline", None)
    assert cut.metrics.turn_gen_tokens == [len(begun.token_ids)]
    assert 0 < len(begun.token_ids) == len(begun.generation_logprobs or ()) < 900
    [again] = client.rollout([resumed(cut)], sampling=sampling).samples
    assert tokens_of(again) == tokens_of(whole)
    [message] = generated(again)
    assert (again.status, message.finish_reason) == ("completed", "length")
    assert message.generation_logprobs == pytest.approx(generated(whole)[0].generation_logprobs, abs=0.05)
    assert [(span.start, span.end) for span in message.weight_versions or ()] == [(0, 900)]


def test_a_batch_of_nemo_rl_that_a_deadline_cut_off_is_run_again_to_the_log_of_an_uncut_one(
    client: RolloutClient,
) -> None:
    prompt = given("user", f"<|user|>\n{QUESTION}<|end|>\n<|assistant|>\n")
    batch: dict[str, Any] = {
        "message_log": [[prompt | {"token_ids": torch.tensor(prompt["token_ids"])}]],
        "extra_env_info": [following({"observation": "."})["extra_env_info"]],
        "task_name": ["following"],
        "loss_multiplier": torch.ones(1),
    }
    sampling = Sampling(greedy=True, ignore_eos=True, max_new_tokens=900)

    def run(batch: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        options: ServiceOptions = {"sampling": sampling, "deadline_s": deadline_s}
        return run_async_multi_turn_rollout(client, batch, 1000, not_final="mask", **options)[0]

    def tokens(played: dict[str, Any]) -> list[list[int]]:
        return [message["token_ids"].tolist() for message in played["message_log"][0]]

    cut = in_the_middle(lambda deadline_s: run(batch, deadline_s), has_begun=lambda played: len(tokens(played)) == 2)
    assert (cut["status"], cut["loss_multiplier"].tolist()) == (["deadline"], [0])
    again = run(cut)
    assert (again["status"], again["loss_multiplier"].tolist()) == (["completed"], [1])
    assert tokens(again) == tokens(run(batch))
    response = again["message_log"][0][1]
    assert (len(response["token_ids"]), len(response["generation_logprobs"])) == (900, 900)


def test_the_first_two_of_four_are_kept_and_the_rest_cancelled(client: RolloutClient) -> None:
    games = client.example_samples("sliding_puzzle", 6, seed=4)
    keep = Keep(per_group=2)
    results = client.rollout(
        games, num_generations=4, sampling=Sampling(max_new_tokens=48), max_rollout_turns=12, keep=keep
    ).samples
    for game in range(6):
        statuses = [result.status for result in results if result.idx == game]
        assert len(statuses) == 4
        assert sum(status != "cancelled" for status in statuses) >= 2
    assert any(result.status == "cancelled" for result in results)


def test_a_stream_that_is_left_early_ends_the_request(client: RolloutClient) -> None:
    take_minutes = [following({})] * 64
    sampling = Sampling(greedy=True, ignore_eos=True, max_new_tokens=4000)
    with client.stream([following({}, stop_strings=["}"]), *take_minutes], sampling=sampling) as rollouts:
        first = next(iter(rollouts))
        assert ongoing_generations() > 0
    assert first.status == "completed"
    wait_until_idle()


def test_a_thousand_samples_of_two_tasks_come_back_complete_and_in_order(client: RolloutClient) -> None:
    sums = client.example_samples("math", 512, seed=9)
    games = client.example_samples("sliding_puzzle", 512, seed=9)
    mixed: list[SampleInput] = [sample for pair in zip(sums, games, strict=True) for sample in pair]
    response = client.rollout(mixed, sampling=Sampling(max_new_tokens=24), max_rollout_turns=3)
    assert [result.idx for result in response.samples] == list(range(1024))
    assert [result.task_name for result in response.samples] == ["math", "sliding_puzzle"] * 512
    assert all(result.error is None for result in response.samples)
    assert {result.metrics.turn_count for result in response.samples} == {1, 2, 3}


def test_a_fork_is_generated_as_its_posted_log_is(client: RolloutClient) -> None:
    turns = [{"observation": "And 2 + 3?"}, {"observation": "And 3 + 3?"}, {}]
    parent = play_one(client, following(*turns), max_rollout_turns=3)
    [_, second, *_] = generated(parent)
    place = parent.message_log.index(second)
    log = [message.model_dump(exclude_unset=True) for message in parent.message_log[:place]]
    state = {**parent.extra_env_info, "turn": 1}
    sample = {"task_name": "following", "fork": {"rollout": parent.rollout_id, "turn": 1}}
    forks = client.rollout([sample], num_generations=2, sampling=GREEDY, max_rollout_turns=3).samples
    framed = parent.observation_format
    same: dict[str, Any] = {"message_log": log, "extra_env_info": state, "observation_format": framed}
    posted = play_one(client, {"task_name": "following", **same}, max_rollout_turns=3)
    for fork in forks:
        assert tokens_of(fork) == tokens_of(posted) == tokens_of(parent)
        assert (fork.rewards, fork.status) == (posted.rewards, posted.status)
        assert fork.parent == parent.rollout_id
    # In the middle of a response, and again at the same tokens: greedy decoding goes on as it went before.
    token = sum(len(message.token_ids) for message in parent.message_log[:place]) + 2
    sample["fork"] = {"rollout": parent.rollout_id, "token": token}
    assert tokens_of(play_one(client, sample, max_rollout_turns=3)) == tokens_of(parent)

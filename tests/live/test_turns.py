"""Everything a rollout is, on the real engine: stop strings, limits, schedules, cuts, and what comes back of them."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from rollout_client.results import resumed
from tests.growing_limits import in_the_middle
from tests.live.following_environment import QUESTION, following
from tests.live.played_with_weights import generated, tokens_of
from tests.live.running_service import ongoing_generations, wait_until_idle
from tests.paths import TINY_MODEL

tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
END = tokenizer.convert_tokens_to_ids("<|end|>")
GREEDY = Sampling(greedy=True, max_new_tokens=32)


def given(role: str, text: str) -> dict[str, Any]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"role": role, "content": text, "token_ids": ids}


def play_one(client: RolloutClient, sample: dict[str, Any], **options: Any) -> SampleResult:
    [result] = client.rollout([sample], **{"sampling": GREEDY, **options}).samples
    assert result.error is None, result.error
    return result


def test_a_generation_of_nothing_but_its_end_is_an_empty_message(client: RolloutClient) -> None:
    prefix = f"<|user|>\n{QUESTION}<|end|>\n<|assistant|>\n\\boxed{{42}}"
    result = play_one(client, following({}, message_log=[given("user", prefix)]))
    assert (generated(result)[0].content, generated(result)[0].token_ids) == ("", [END])


def test_special_tokens_and_broken_characters_are_in_ids_not_in_text(client: RolloutClient) -> None:
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


def test_a_message_that_a_deadline_cuts_keeps_its_tokens_and_goes_on(client: RolloutClient) -> None:
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


def test_a_stream_that_is_left_early_ends_the_request(client: RolloutClient) -> None:
    take_minutes = [following({})] * 64
    sampling = Sampling(greedy=True, ignore_eos=True, max_new_tokens=4000)
    with client.stream([following({}, stop_strings=["}"]), *take_minutes], sampling=sampling) as rollouts:
        first = next(iter(rollouts))
        assert ongoing_generations() > 0
    assert first.status == "completed"
    wait_until_idle()


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

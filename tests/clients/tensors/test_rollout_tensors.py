"""Rollouts as tensors: exact values of what counts, and laws that hold for any batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import SampleResult
from rollout_client.calls.arrow_bodies import ArrowResponse, read_response
from rollout_client.results import is_clipped
from rollout_client.tensors import PaddingSide, RolloutTensors, to_tensors
from tests.clients.message_logs import NOT_FREE, ONE_TURN, TWO_TURNS, failed, generated, given_message, rollout
from tests.clients.scripted_service import arrow

PAD = 99
NAN = float("nan")


# Tokens


def test_a_row_is_the_log_with_what_the_policy_generated_marked() -> None:
    tensors = to_tensors([TWO_TURNS, ONE_TURN], pad_token_id=PAD)
    assert tensors.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 9, *[PAD] * 6]]
    assert tensors.attention_mask.tolist() == [[1] * 8, [1, 1, *[0] * 6]]
    assert tensors.loss_mask.tolist() == [[0, 0, 1, 1, 0, 1, 0, 0], [0, 1, *[0] * 6]]
    assert tensors.generation_logprobs.tolist() == [[0, 0, -0.25, -0.25, 0, -1.5, 0, 0], [0, -0.5, *[0] * 6]]
    assert tensors.weight_versions.tolist() == [[-1, -1, 7, 8, -1, 8, -1, -1], [-1] * 8]
    assert tensors.prompt_lengths.tolist() == [2, 1]
    assert tensors.lengths.tolist() == [8, 2]


def test_integers_are_int64_and_the_rest_is_float32() -> None:
    tensors = to_tensors([TWO_TURNS], pad_token_id=PAD)
    floats = {"generation_logprobs", "total_reward", "advantages"}
    for name in RolloutTensors.__slots__:
        if name not in ("rewards", "included", "rollout_ids"):
            assert getattr(tensors, name).dtype == (torch.float32 if name in floats else torch.int64), name
    assert tensors.rewards["reward"].dtype == torch.float32


def test_a_message_with_other_than_one_logprob_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="2 token_ids and 1 generation_logprobs"):
        to_tensors([rollout(generated(1, 2, generation_logprobs=[-0.5]))], pad_token_id=PAD)


def test_tensors_move_to_a_device_together() -> None:
    moved = to_tensors([ONE_TURN], pad_token_id=PAD).to("meta")
    assert moved.input_ids.device.type == moved.rewards["reward"].device.type == "meta"


# Reports of what a trainer has computed


def named_rollouts() -> list[SampleResult]:
    names = ("first", "second", "third")
    return [
        rollout.model_copy(update={"rollout_id": name})
        for rollout, name in zip([TWO_TURNS, failed(given_message(1), generated(8)), ONE_TURN], names, strict=True)
    ]


def lists(columns: Any) -> dict[str, Any]:
    return {
        name: [each.tolist() if isinstance(each, torch.Tensor) else each for each in rows]
        for name, rows in columns.items()
    }


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_report_has_the_numbers_of_each_row_without_padding(padding_side: PaddingSide, skipped: int) -> None:
    tensors = to_tensors(named_rollouts(), pad_token_id=PAD, padding_side=padding_side)
    # A number for each token: minus its id.
    assert lists(tensors.report(-tensors.input_ids[:, skipped:].float())) == {
        "rollouts": ["first", "third"],
        "logprobs": [[-1, -2, -3, -4, -5, -6, -7, -8][skipped:], [-1, -9][skipped:]],
        "masks": [[0, 0, 1, 1, 0, 1, 0, 0][skipped:], [0, 1][skipped:]],
        "token_ids": [[1, 2, 3, 4, 5, 6, 7, 8], [1, 9]],
    }


def test_a_report_can_be_of_some_rows_with_the_mask_of_the_trainer() -> None:
    tensors = to_tensors(named_rollouts(), pad_token_id=PAD, not_final="mask")
    rows = torch.tensor([2, 1])
    assert lists(tensors.report(torch.full((2, 8), -0.5), rows=rows, mask=torch.ones(2, 8))) == {
        "rollouts": ["third", "second"],
        "logprobs": [[-0.5, -0.5]] * 2,
        "masks": [[1, 1]] * 2,
        "token_ids": [[1, 9], [1, 8]],
    }


def test_a_report_of_another_shape_or_without_ids_is_refused() -> None:
    tensors = to_tensors(named_rollouts(), pad_token_id=PAD)
    with pytest.raises(ValueError, match=r"logprobs are \[2, 6\]: give \[2, 8\], one for each token"):
        tensors.report(torch.zeros(2, 6))
    with pytest.raises(ValueError, match="no row has a rollout_id"):
        to_tensors([ONE_TURN], pad_token_id=PAD).report(torch.zeros(1, 2))


def in_arrow(samples: Sequence[SampleResult]) -> ArrowResponse:
    return read_response(arrow(*samples).body)


def test_what_may_not_be_trained_is_not_in_the_loss_in_any_form() -> None:
    samples = [failed(*NOT_FREE.model_dump(exclude_unset=True)["message_log"]), TWO_TURNS, NOT_FREE]
    for response in (samples, in_arrow(samples)):
        tensors = to_tensors(response, pad_token_id=PAD)
        assert tensors.loss_mask.tolist() == [[0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 1, 0, 0]]
        assert tensors.generation_logprobs[1].tolist() == [0, -0.5, -0.5, -1, -0.5, -0.5, -0.5, 0]
        assert tensors.prompt_lengths.tolist() == [2, 1]


def test_words_of_a_message_do_not_take_it_out_of_the_loss() -> None:
    call = {"id": "c", "function": {"constrained": True, "name": '"constrained":true'}}
    said = rollout(generated(3, tool_calls=[call], reasoning_content='{"sampled_with":{"temperature":0}}'))
    assert to_tensors(in_arrow([said]), pad_token_id=PAD).loss_mask.tolist() == [[1]]


def test_rows_of_an_arrow_answer_have_the_same_ids() -> None:
    response = in_arrow([*named_rollouts(), ONE_TURN])
    assert to_tensors(response, pad_token_id=PAD).rollout_ids == ["first", "third", None]
    assert to_tensors(response, pad_token_id=PAD, not_final="mask").rollout_ids == ["first", "second", "third", None]


# Rewards and groups


def rewarded(*rewards: float, idx: int = 0) -> list[SampleResult]:
    return [rollout(generated(1), reward=reward, idx=idx, generation_index=at) for at, reward in enumerate(rewards)]


def test_advantages_are_relative_to_a_group_of_one_idx_or_another_key() -> None:
    samples = [*rewarded(0, 2, idx=4), *rewarded(5, 7, idx=1)]
    by_idx = to_tensors(samples, pad_token_id=PAD, scale_rewards=False)
    assert (by_idx.advantages.tolist(), by_idx.groups.tolist()) == ([-1, 1, -1, 1], [0, 0, 1, 1])
    tensors = to_tensors(samples, pad_token_id=PAD, scale_rewards=False, group_of=lambda each: each.generation_index)
    assert (tensors.advantages.tolist(), tensors.groups.tolist()) == ([-2.5, -2.5, 2.5, 2.5], [0, 1, 0, 1])


def test_named_rewards_are_nan_where_a_rollout_has_none_of_the_name() -> None:
    samples = [rollout(generated(1), rewards={"form": 0.5, "sum": 1.0}), rollout(generated(1), rewards={"form": 0.25})]
    rewards = to_tensors(samples, pad_token_id=PAD).rewards
    assert rewards["form"].tolist() == [0.5, 0.25]
    assert rewards["sum"].tolist() == pytest.approx([1.0, NAN], nan_ok=True)


# Rollouts without a final reward


@pytest.mark.parametrize(
    "without", [failed(generated(8)), rollout(generated(8), reward=9.0, status="deadline")], ids=["error", "deadline"]
)
def test_a_rollout_without_a_final_reward_is_dropped_and_in_no_statistic(without: SampleResult) -> None:
    tensors = to_tensors([without, *rewarded(0, 2)], pad_token_id=PAD, scale_rewards=False)
    assert tensors.advantages.tolist() == [-1, 1]
    assert tensors.positions.tolist() == [1, 2]
    assert tensors.sample_mask.tolist() == [1, 1]


def test_such_a_rollout_can_be_kept_as_a_row_that_moves_nothing() -> None:
    tensors = to_tensors([failed(given_message(1), generated(8)), *rewarded(0, 2)], pad_token_id=PAD, not_final="mask")
    assert tensors.input_ids[0].tolist() == [1, 8]
    assert tensors.loss_mask[0].tolist() == [0, 0]
    assert tensors.sample_mask.tolist() == [0, 1, 1]
    assert tensors.advantages[0].item() == 0
    assert tensors.advantages[1:].tolist() == pytest.approx([-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)])
    assert tensors.total_reward.tolist() == pytest.approx([NAN, 0, 2], nan_ok=True)


# Laws

token_lists = st.lists(st.integers(0, 2**31), max_size=5)
messages = st.one_of(
    token_lists.map(lambda ids: given_message(*ids)),
    st.builds(
        lambda ids, reason: generated(*ids, logprob=-0.125, finish_reason=reason),
        token_lists,
        st.sampled_from(["stop", "length", None]),
    ),
)
rollouts = st.builds(
    lambda log, idx, reward: rollout(*log, idx=idx, reward=reward),
    st.lists(messages, max_size=5),
    st.integers(0, 2),
    st.floats(-100, 100),
)


@given(st.lists(rollouts, max_size=6), st.sampled_from(["left", "right"]), st.integers(1, 7))
def test_unpadding_gives_back_each_log(samples: list[SampleResult], padding_side: PaddingSide, multiple: int) -> None:
    tensors = to_tensors(samples, pad_token_id=0, padding_side=padding_side, pad_to_multiple_of=multiple)
    for row, sample in enumerate(samples):
        unpadded = tensors.input_ids[row][tensors.attention_mask[row].bool()]
        assert unpadded.tolist() == [token_id for message in sample.message_log for token_id in message.token_ids]
        generated_tokens = [message for message in sample.message_log if message.generation_logprobs is not None]
        assert tensors.loss_mask[row].sum() == sum(len(message.token_ids) for message in generated_tokens)
    assert (tensors.generation_logprobs == -0.125).long().tolist() == tensors.loss_mask.tolist()
    assert tensors.lengths.tolist() == tensors.attention_mask.sum(dim=1).tolist()
    assert tensors.input_ids.shape[1] % multiple == 0


@given(st.lists(rollouts, max_size=6))
def test_the_clipped_mask_marks_rollouts_whose_last_response_was_cut(samples: list[SampleResult]) -> None:
    assert to_tensors(samples, pad_token_id=0).clipped_mask.tolist() == [int(is_clipped(each)) for each in samples]


def test_versions_of_named_policies_are_their_numbers() -> None:
    spans = [{"version": "run-b/7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    tensors = to_tensors([rollout(given_message(1), generated(2, 3, weight_versions=spans))], pad_token_id=PAD)
    assert tensors.weight_versions.tolist() == [[-1, 7, 8]]

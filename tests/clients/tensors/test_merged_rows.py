"""Prefixes that stand once: exact layouts, and the laws that a model computes the same with them as without."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_client import SampleResult, seats_of
from rollout_client.tensors import Credit, MergedTensors, NotFinal, PaddingSide, RolloutTensors, to_tensors
from tests.clients.message_logs import failed, generated, given_message, rollout
from tests.clients.scripted_service import Json

PAD = 0
VOCABULARY = 12


def merged(samples: Sequence[SampleResult], **options: Any) -> MergedTensors:
    tensors: MergedTensors = to_tensors(samples, pad_token_id=PAD, merge="prefix", **options)
    return tensors


# A group with a shared prompt, whose second and third rollout part after a token that they both generated.
TWO_TURNS = rollout(given_message(1, 2), generated(3, 4), given_message(5), generated(6), reward=3.0)
SHORT = rollout(given_message(1, 2), generated(3, 7), reward=0.0)
OTHER = rollout(given_message(1, 2), generated(8), reward=0.0)
GROUP = [TWO_TURNS, SHORT, OTHER]
ALONE = rollout(given_message(9), generated(3), idx=1)


# The layout


def test_what_rollouts_share_stands_once_and_what_follows_it_in_any_of_them_comes_after_it() -> None:
    rows = merged(GROUP).merged
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 3, 2]]
    assert rows.parents.tolist() == [[0, 0, 1, 2, 3, 4, 2, 1]]
    assert rows.subtree_ends.tolist() == [[8, 8, 7, 6, 6, 6, 7, 8]]
    assert rows.sequence_ids.tolist() == [[0] * 8]
    assert rows.loss_mask.tolist() == [[0, 0, 1, 1, 0, 1, 1, 1]]
    assert rows.row_tokens.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, -1, -1], [0, 1, 7, -1, -1, -1]]
    assert rows.lengths.tolist() == [8]


def test_a_token_attends_to_what_came_before_it_in_its_rollout_and_to_nothing_else() -> None:
    assert merged(GROUP).merged.dense_mask().int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0, 0, 0],
                [1, 1, 1, 1, 0, 0, 0, 0],
                [1, 1, 1, 1, 1, 0, 0, 0],
                [1, 1, 1, 1, 1, 1, 0, 0],
                [1, 1, 1, 0, 0, 0, 1, 0],
                [1, 1, 0, 0, 0, 0, 0, 1],
            ]
        ]
    ]


def test_a_shared_token_has_the_mean_of_its_advantages_and_the_number_of_rollouts_that_it_stands_for() -> None:
    rows = merged(GROUP, scale_rewards=False).merged
    assert rows.advantages.tolist() == [[0, 0, 0.5, 2, 0, 2, -1, -1]]
    assert rows.row_counts.tolist() == [[0, 0, 2, 1, 0, 1, 1, 1]]


def test_advantages_of_turns_are_merged_alike() -> None:
    second = rollout(given_message(1, 2), generated(3, 4), given_message(5), generated(7), reward=1.0)
    rows = merged([TWO_TURNS, second], scale_rewards=False, credit=lambda _: [[1.0, 2.0], [3.0, 4.0]]).merged
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert rows.advantages.tolist() == [[0, 0, 2, 2, 0, 2, 4]]


def test_padding_attends_to_itself_alone() -> None:
    rows = merged(GROUP, pad_to_multiple_of=5).merged
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, PAD, PAD]]
    assert rows.sequence_ids.tolist() == [[0] * 8 + [-1] * 2]
    assert rows.position_ids[0, 8:].tolist() == [0, 0]
    assert rows.dense_mask()[0, 0, 8:].int().tolist() == [[0] * 8 + [1, 0], [0] * 9 + [1]]
    assert rows.weight_versions[0, 8:].tolist() == [-1, -1]


@pytest.mark.parametrize(
    "other",
    [
        rollout(given_message(1, 2, 3), generated(4)),
        rollout(given_message(1, 2), generated(3, logprob=-0.25)),
        rollout(given_message(1, 2), generated(3, weight_versions=[{"version": "5", "start": 0, "end": 1}])),
    ],
    ids=["not generated", "another log-probability", "another version"],
)
def test_a_token_that_is_equal_but_was_not_generated_alike_is_not_shared(other: SampleResult) -> None:
    rows = merged([rollout(given_message(1, 2), generated(3)), other]).merged
    assert rows.lengths.tolist() == [4 if len(other.message_log[0].token_ids) == 2 else 5]
    assert rows.loss_mask.sum() == 2


def test_rollouts_of_different_groups_share_nothing() -> None:
    assert merged([SHORT, SHORT.model_copy(update={"idx": 1})], token_budget=4).merged.lengths.tolist() == [4, 4]


def test_rollouts_of_which_nothing_is_trained_stand_nowhere() -> None:
    tensors = merged(
        [failed(given_message(1, 2), generated(3)), OTHER, rollout(given_message(1, 2, 3, 4))], not_final="mask"
    )
    assert tensors.positions.tolist() == [0, 1, 2]
    assert tensors.merged.input_ids.tolist() == [[1, 2, 8]]
    assert tensors.merged.row_tokens.tolist() == [[-1] * 4, [0, 1, 2, -1], [-1] * 4]


def test_no_samples_are_no_rows() -> None:
    tensors = merged([])
    assert tensors.merged.input_ids.shape == (0, 0)
    assert list(tensors.split()) == []


# Branches


def forest() -> SampleResult:
    """A rollout whose first response another branch shares, and a subagent with a prompt of its own."""
    return rollout(
        given_message(1),
        generated(2),
        given_message(3),
        generated(4),
        reward=2.0,
        branches=[
            {"message_log": [given_message(1), generated(2), given_message(5), generated(6)], "shared_messages": [1]},
            {"message_log": [given_message(7), generated(8)], "shared_messages": []},
        ],
    )


def test_branches_are_rows_with_the_values_of_their_rollout() -> None:
    tensors = merged([forest(), rollout(given_message(1), generated(9), reward=0.0)], scale_rewards=False)
    assert tensors.input_ids.tolist() == [[1, 2, 3, 4], [1, 9, PAD, PAD], [1, 2, 5, 6], [7, 8, PAD, PAD]]
    assert tensors.positions.tolist() == [0, 1, 0, 0]
    assert tensors.total_reward.tolist() == [2, 0, 2, 2]
    assert tensors.advantages.tolist() == [1, -1, 1, 1]
    assert tensors.groups.tolist() == [0, 0, 0, 0]


def test_each_response_of_a_forest_stands_once() -> None:
    rows = merged([forest()]).merged
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, PAD, PAD, PAD, PAD]]
    assert rows.row_counts.tolist() == [[0, 2, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0]]


def test_seats_with_rewards_of_their_own_are_refused_and_are_rollouts_by_seats_of() -> None:
    other = {"message_log": [given_message(1), generated(3)], "rewards": {"seat_1": -1.0}}
    game = rollout(given_message(1), generated(2), rewards={"seat_0": 1.0}, branches=[other])
    with pytest.raises(ValueError, match=r"pass each as a rollout, by seats_of\(sample\)"):
        to_tensors([game], pad_token_id=0, merge="prefix")
    tensors = to_tensors(seats_of(game), pad_token_id=0, group_of=lambda seat: (seat.idx, *seat.rewards))
    assert (tensors.total_reward.tolist(), tensors.groups.tolist()) == ([1.0, -1.0], [0, 1])


def test_without_merge_there_are_no_branches() -> None:
    assert to_tensors([forest()], pad_token_id=PAD).input_ids.tolist() == [[1, 2, 3, 4]]


# Packing


def test_rows_are_filled_up_to_the_budget_and_those_that_branch_stand_apart() -> None:
    lengths = [4, 2, 5, 3]
    samples = [rollout(given_message(1), generated(*range(2, 1 + length)), idx=length) for length in lengths]
    rows = merged([*GROUP, *samples], token_budget=9).merged
    assert rows.is_branched.tolist() == [True, False, False]
    assert rows.lengths.tolist() == [8, 9, 5]
    assert [rows.cu_seqlens(row).tolist() for row in (1, 2)] == [[0, 5, 9], [0, 3, 5]]
    assert rows.cu_seqlens(1).dtype == torch.int32
    with pytest.raises(ValueError, match="Row 0 has branches"):
        rows.cu_seqlens(0)


def test_a_rollout_that_goes_on_from_another_is_no_branch() -> None:
    rows = merged([SHORT, rollout(given_message(1, 2), generated(3, 7), given_message(5))]).merged
    assert rows.input_ids.tolist() == [[1, 2, 3, 7, 5]]
    assert rows.is_branched.tolist() == [False]
    assert rows.cu_seqlens(0).tolist() == [0, 5]


def test_a_group_that_is_larger_than_the_budget_is_cut_and_its_parts_begin_with_the_same_prefix() -> None:
    samples = [rollout(given_message(1, 2, 3), generated(last)) for last in (4, 5, 6, 7, 8)]
    rows = merged(samples, token_budget=5).merged
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 8, PAD]]
    assert rows.is_branched.tolist() == [True, True, False]


def test_a_rollout_that_is_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="6 tokens, and token_budget is 5"):
        merged(GROUP, token_budget=5)


def test_a_batch_splits_into_one_part_for_each_row() -> None:
    parts = list(merged([ALONE, *GROUP]).split())
    assert [part.positions.tolist() for part in parts] == [[1, 2, 3], [0]]
    assert [part.merged.input_ids.tolist() for part in parts] == [
        [[1, 2, 3, 4, 5, 6, 7, 8]],
        [[9, 3] + [PAD] * 6],
    ]
    assert parts[1].merged.row_tokens.tolist() == [[0, 1, -1, -1, -1, -1]]


def test_tensors_move_to_a_device_together() -> None:
    moved = merged(GROUP).to("meta")
    assert moved.input_ids.device.type == moved.merged.input_ids.device.type == "meta"
    assert moved.rewards["reward"].device.type == moved.merged.row_tokens.device.type == "meta"


# Laws

token_lists = st.lists(st.integers(1, 3), max_size=3)
observations = token_lists.map(lambda ids: given_message(*ids))
responses = st.builds(lambda ids, logprob: generated(*ids, logprob=logprob), token_lists, st.sampled_from([-1.5, -1.0]))
logs = st.builds(
    lambda prompt, turns: [given_message(*prompt), *chain.from_iterable(turns)],
    st.sampled_from([[4, 5, 6], [4, 5], [7], []]),
    st.lists(st.tuples(responses, observations), max_size=3),
)


def with_branches(log: Sequence[Json], idx: int, reward: float, status: str, others: Sequence[Json]) -> SampleResult:
    return rollout(*log, idx=idx, reward=reward, status=status, branches=[{"message_log": other} for other in others])


rollouts = st.builds(
    with_branches,
    logs,
    st.integers(0, 1),
    st.floats(-2, 2),
    st.sampled_from(["completed", "truncated", "deadline"]),
    st.lists(logs, max_size=2),
)
batches = st.lists(rollouts, max_size=5)
budgets = st.sampled_from([None, 21, 40])
"""A rollout has at most 21 tokens."""


@given(batches, st.sampled_from(["left", "right"]), st.sampled_from(["drop", "mask"]), st.integers(1, 5), budgets)
def test_every_token_of_a_rollout_stands_behind_those_before_it(
    samples: list[SampleResult], side: PaddingSide, not_final: NotFinal, multiple: int, budget: int | None
) -> None:
    tensors = merged(samples, padding_side=side, not_final=not_final, pad_to_multiple_of=multiple, token_budget=budget)
    rows = tensors.merged
    width = rows.input_ids.shape[1]
    mask = rows.dense_mask()
    for row, places in enumerate(rows.row_tokens):
        standing = places[places >= 0]
        if not tensors.loss_mask[row].any():
            assert not len(standing)
            continue
        is_token = tensors.attention_mask[row].bool()
        number, at = divmod(int(standing[0]), width)[0], standing % width
        assert (standing // width == number).all()
        for name in ("input_ids", "loss_mask", "generation_logprobs", "weight_versions"):
            assert getattr(rows, name)[number, at].tolist() == getattr(tensors, name)[row, is_token].tolist(), name
        assert rows.position_ids[number, at].tolist() == list(range(len(at)))
        assert rows.parents[number, at].tolist() == [at[0], *at[:-1]]
        for count, place in enumerate(at, start=1):
            assert mask[number, 0, place].nonzero()[:, 0].tolist() == at[:count].tolist()
    assert rows.lengths.tolist() == (rows.sequence_ids >= 0).sum(1).tolist()
    assert width % multiple == 0
    assert budget is None or all(length <= budget for length in rows.lengths.tolist())


@given(batches)
def test_each_distinct_prefix_of_a_group_is_one_token(samples: list[SampleResult]) -> None:
    tensors = merged(samples)
    columns = (tensors.input_ids, tensors.loss_mask, tensors.generation_logprobs)
    prefixes = {
        (int(tensors.groups[row]), *zip(*(column[row, :end].tolist() for column in columns), strict=True))
        for row in range(len(tensors.input_ids))
        if tensors.loss_mask[row].any()
        for end in range(1, int(tensors.lengths[row]) + 1)
    }
    assert int(tensors.merged.lengths.sum()) == len(prefixes)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.5
    )
    # Of its parts all compute in float64, where those of newer models take float32 for some; and its positions are
    # absolute. Without training there is no dropout.
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.double().eval()


def row_logprobs(model: torch.nn.Module, tensors: RolloutTensors) -> Tensor:
    logits = model(input_ids=tensors.input_ids, attention_mask=tensors.attention_mask).logits
    predicted = logits[:, :-1].log_softmax(-1).gather(2, tensors.input_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(predicted, (1, 0)) * tensors.attention_mask


def merged_logprobs(model: torch.nn.Module, tensors: MergedTensors) -> Tensor:
    rows = tensors.merged
    logits = model(input_ids=rows.input_ids, position_ids=rows.position_ids, attention_mask=rows.dense_mask()).logits
    return rows.token_logprobs(logits)


def clipped_loss(logprobs: Tensor, tensors: RolloutTensors) -> Tensor:
    """The objective of PPO, which is not linear in the advantages."""
    advantages = tensors.advantages if tensors.advantages.ndim == 2 else tensors.advantages[:, None]
    ratio = (logprobs - tensors.generation_logprobs).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * tensors.loss_mask).sum()


def gradients(model: torch.nn.Module, *losses: Tensor) -> Iterator[Tensor]:
    model.zero_grad()
    for loss in losses:
        torch.autograd.backward(loss)
    return (parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)


def assert_same_gradients(model: torch.nn.Module, losses: Sequence[Tensor], expected: Tensor) -> None:
    torch.testing.assert_close(sum(loss.detach() for loss in losses), expected.detach(), rtol=1e-9, atol=1e-9)
    ours = list(gradients(model, *losses))
    for gradient, other in zip(ours, gradients(model, expected), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


trained_batches = batches.filter(lambda samples: bool(len(merged(samples).merged.lengths)))
credits = st.sampled_from(["total", "turn"])


@settings(max_examples=25, deadline=None)
@given(trained_batches, credits, budgets)
def test_loss_and_gradients_are_those_of_the_rows_for_any_loss_of_rollouts(
    model: torch.nn.Module, samples: list[SampleResult], credit: Credit, budget: int | None
) -> None:
    tensors = merged(samples, credit=credit, token_budget=budget)
    parts = [clipped_loss(part.merged.unmerged(merged_logprobs(model, part)), part) for part in tensors.split()]
    assert_same_gradients(model, parts, clipped_loss(row_logprobs(model, tensors), tensors))


@settings(max_examples=25, deadline=None)
@given(trained_batches, credits, budgets)
def test_loss_and_gradients_are_those_of_the_rows_for_a_sum_over_tokens(
    model: torch.nn.Module, samples: list[SampleResult], credit: Credit, budget: int | None
) -> None:
    tensors = merged(samples, credit=credit, token_budget=budget)
    rows = tensors.merged
    ours = -(merged_logprobs(model, tensors) * rows.advantages * rows.row_counts).sum()
    advantages = tensors.advantages if tensors.advantages.ndim == 2 else tensors.advantages[:, None]
    expected = -(row_logprobs(model, tensors) * advantages * tensors.loss_mask).sum()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)  # the mean of advantages is rounded to float32
    for gradient, other in zip(list(gradients(model, ours)), gradients(model, expected), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


# Trees of forks


# Two trunks of one prompt; the first was forked twice after its first turn.
TRUNK = rollout(given_message(1), generated(2), given_message(3), generated(4), reward=0.0)
FORKS = [rollout(given_message(1), generated(2), given_message(3), generated(last), reward=1.0) for last in (5, 6)]
OTHER_TRUNK = rollout(given_message(1), generated(7), reward=1.0)
TREE = [TRUNK, *FORKS, OTHER_TRUNK]


def test_a_step_has_the_mean_of_the_leaves_below_it_less_that_of_the_leaves_below_the_step_before() -> None:
    rows = merged(TREE).merged
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    returns = torch.tensor([0.0, 1.0, 1.0, 1.0])
    gained = rows.step_advantages(returns)
    third = 1 / 3
    torch.testing.assert_close(gained, torch.tensor([[0, 2 * third - 0.75, 0, -2 * third, third, third, 0.25]]))


def test_a_step_that_no_other_rollout_has_branched_from_has_one_advantage_from_branch_to_end() -> None:
    rows = merged([TWO_TURNS, OTHER]).merged
    gained = rows.step_advantages(torch.tensor([3.0, 0.0]))
    assert gained.tolist() == [[0, 0, 1.5, 1.5, 0, 1.5, -1.5]]


@settings(max_examples=100, deadline=None)
@given(batches)
def test_the_advantages_of_the_steps_of_a_rollout_add_up_to_its_return_over_the_mean_of_its_tree(
    samples: list[SampleResult],
) -> None:
    # Each rollout is a turn longer than its tree, so that it is a leaf of its own.
    leaves = [
        sample.model_copy(update={"message_log": [*sample.message_log, one], "branches": []})
        for number, sample in enumerate(samples)
        for one in [rollout(generated(VOCABULARY + number)).message_log[0]]
    ]
    tensors = merged(leaves)
    rows = tensors.merged
    returns = torch.arange(len(tensors.input_ids), dtype=torch.float32) ** 2
    # All tokens of a step have one advantage: that of its last token, which a mask of none but the trained would hide.
    everything = replace(rows, loss_mask=torch.ones_like(rows.loss_mask))
    gained = everything.step_advantages(returns).flatten()
    counts = torch.zeros(rows.input_ids.numel()).index_add(
        0, rows.row_tokens[rows.row_tokens >= 0], torch.ones(int((rows.row_tokens >= 0).sum()))
    )
    for row, places in enumerate(rows.row_tokens):
        standing = places[places >= 0]
        if not len(standing):
            continue
        steps = [int(standing[0])]
        steps += [int(here) for before, here in pairwise(standing) if counts[here] < counts[before]]
        first = [other for other, others in enumerate(rows.row_tokens) if standing[0] in others]
        expected = returns[row] - returns[first].mean()
        torch.testing.assert_close(gained[steps].sum(), expected, rtol=1e-5, atol=1e-3)


def test_a_shared_prefix_is_trained_once_and_its_loss_is_the_mean_over_its_leaves(model: torch.nn.Module) -> None:
    rewards = (1.0, 4.0, 4.0, -1.0)
    tree = [leaf.model_copy(update={"total_reward": reward}) for leaf, reward in zip(TREE, rewards, strict=True)]
    tensors = merged(tree, scale_rewards=False)
    rows, each = tensors.merged, row_logprobs(model, tensors)
    # As sums over the leaves, by the rows of the rollouts alone.
    of_leaves = -(each * tensors.advantages[:, None] * tensors.loss_mask).sum(1)
    weighed = -(merged_logprobs(model, tensors) * rows.advantages * rows.row_counts).sum() / len(TREE)
    assert_same_gradients(model, [weighed], of_leaves.mean())
    # Each token once, with the mean of the advantages of its leaves: the prefix of three rollouts counts a third.
    share = torch.tensor([[0, 1 / 3, 0, 1], [0, 1 / 3, 0, 1], [0, 1 / 3, 0, 1], [0, 1, 0, 0]], dtype=each.dtype)
    each = row_logprobs(model, tensors)
    once = -(merged_logprobs(model, tensors) * rows.advantages).sum()
    assert_same_gradients(model, [once], -(each * tensors.advantages[:, None] * tensors.loss_mask * share).sum())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_is_the_dense_mask() -> None:
    rows = merged([*GROUP, forest().model_copy(update={"idx": 2}), ALONE], token_budget=8, pad_to_multiple_of=16).merged
    torch.manual_seed(0)
    query, key, value = torch.randn(3, len(rows.input_ids), 2, rows.input_ids.shape[1], 8, dtype=torch.float64)
    sparse = flex_attention(query, key, value, block_mask=rows.block_mask())
    dense = scaled_dot_product_attention(query, key, value, attn_mask=rows.dense_mask())
    assert isinstance(sparse, Tensor)
    torch.testing.assert_close(sparse, dense)


def test_blocks_that_do_not_attend_to_each_other_are_skipped() -> None:
    prompt = [given_message(*[1] * 128)]
    samples = [rollout(*prompt, generated(*[last] * 128)) for last in range(2, 8)]
    mask = merged(samples, pad_to_multiple_of=128).merged.block_mask()
    # Of 7 x 7 blocks the prompt's own, and for each response the prompt's and its own.
    assert mask.to_dense().sum() == 1 + 6 * 2

"""Further numbers of each token: they stay with their tokens, whatever interrupts a generation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from deployments.protocols.generation import Generation, GenerationRequest, IncludedColumns
from deployments.protocols.token_columns import EXPERTS, MASK, MASK_SIZES, RoutedExperts, packed_rows
from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import COLUMN_FIELDS, Message, PackedNumbers, SampledWith
from rollout_client.contract.rollouts import SampleResult
from service.jobs.codec import _state_of, turn_entry
from service.rollouts.loop import _play_sample
from service.rollouts.messages import continued, first_tokens_of
from tests import virtual_time
from tests.service.rollouts.playing import (
    InterruptedGenerator,
    RandomEnvironment,
    RandomGenerator,
    async_context,
    error_of,
    play,
    recipes,
)
from tests.service.scripted import CharacterChatTokenizer, EpisodeRecipe, ids_of, user_message

ALL = IncludedColumns(sampling_mask=True, entropy=True, routed_experts=True)
ENTROPY, TOP = packed_rows([0.5], "float32"), packed_rows([0], "float32", [1])


def mask_at(place: int) -> list[int]:
    return list(range(place % 4))


def experts_of(token_ids: Sequence[int], place: int) -> list[int]:
    """Of two layers with one expert a token each; they depend on the tokens up to this one."""
    return [sum(token_ids[: place + 1]) % 256, place % 256]


def columns_of(request: GenerationRequest, tokens: Sequence[int]) -> dict[str, PackedNumbers]:
    """Each number says at which place of the log its token stands."""
    begin, ids = len(request.prompt_token_ids), [*request.prompt_token_ids, *tokens]
    places = range(begin, len(ids))
    return {
        "entropy": packed_rows([float(place) for place in places], "float32"),
        MASK: packed_rows([id_ for place in places for id_ in mask_at(place)], "int32"),
        MASK_SIZES: packed_rows([len(mask_at(place)) for place in places], "uint16"),
        EXPERTS: packed_rows(
            [expert for place in range(request.experts_from, len(ids) - 1) for expert in experts_of(ids, place)],
            "uint8",
            [2, 1],
        ),
    }


class WholeGenerator(RandomGenerator):
    async def generate(self, request: GenerationRequest) -> Generation:
        whole = await super().generate(request)
        return replace(whole, columns=columns_of(request, whole.token_ids))


class PartGenerator(InterruptedGenerator):
    async def generate(self, request: GenerationRequest) -> Generation:
        part = await super().generate(request)
        return replace(part, columns=columns_of(request, part.token_ids))


def assert_numbers_are_with_their_tokens(result: SampleResult) -> None:
    ids = [id_ for message in result.message_log for id_ in message.token_ids]
    generated = [place for place, message in enumerate(result.message_log) if message.generation_logprobs is not None]
    first = 0
    experts: list[int] = []
    for message in result.message_log:
        places = range(first, first + len(message.token_ids))
        first += len(message.token_ids)
        rows = message.routed_experts
        experts += list(rows.data) if rows is not None else []
        if message.generation_logprobs is None:
            assert (message.entropy, message.sampling_mask, message.sampling_mask_sizes) == (None, None, None)
            continue
        assert message.entropy == packed_rows([float(place) for place in places], "float32")
        assert message.sampling_mask == packed_rows([id_ for place in places for id_ in mask_at(place)], "int32")
        assert message.sampling_mask_sizes == packed_rows([len(mask_at(place)) for place in places], "uint16")
    if generated:
        last = sum(len(message.token_ids) for message in result.message_log[: generated[-1] + 1]) - 1
        assert experts == [expert for place in range(last) for expert in experts_of(ids, place)]


@given(recipes, st.integers(0, 2**32))
def test_each_token_keeps_its_numbers_through_interruptions(recipe: EpisodeRecipe, seed: int) -> None:
    recipe = replace(recipe, include=ALL, retries=10_000)
    whole = play(recipe, WholeGenerator(), RandomEnvironment())
    assert_numbers_are_with_their_tokens(whole)
    assert play(recipe, PartGenerator(seed), RandomEnvironment()).model_copy(update={"replay": whole.replay}) == whole


@given(recipes)
def test_a_log_that_is_posted_again_goes_on_with_its_numbers(recipe: EpisodeRecipe) -> None:
    recipe = replace(recipe, include=ALL)
    first = play(replace(recipe, max_rollout_turns=1), WholeGenerator(), RandomEnvironment())
    generator = WholeGenerator()
    second = play(replace(recipe, message_log=lambda _: first.message_log), generator, RandomEnvironment())
    assert_numbers_are_with_their_tokens(second)
    computed = sum(0 if row.routed_experts is None else row.routed_experts.shape[0] for row in first.message_log)
    assert [request.experts_from for request in generator.requests[:1]] in ([], [computed])


def test_experts_of_another_shape_than_posted_fail_the_rollout() -> None:
    log = [user_message("Q").model_copy(update={"routed_experts": packed_rows([1] * 3, "uint8", [3, 1])})]
    result = play(EpisodeRecipe(message_log=lambda _: log, include=ALL), WholeGenerator(), RandomEnvironment())
    assert (error_of(result)["kind"], error_of(result)["message"]) == (
        "generation",
        "The model's routed_experts are uint8 of shape [2, 1] a token, those of the posted message_log uint8 of "
        "[3, 1]: post the log without them.",
    )


def test_posted_experts_are_known_up_to_the_first_message_that_has_others() -> None:
    rows = [packed_rows([1] * width, "uint8", [width]) for width in (3, 2)]
    log = [user_message("Q").model_copy(update={"routed_experts": each}) for each in rows]
    assert RoutedExperts(log).packed() == rows[0]


def test_a_response_that_cannot_be_added_leaves_no_experts() -> None:
    class BrokenTokenizer(CharacterChatTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            raise ValueError("no text")

    log = EpisodeRecipe().make().log
    generation = Generation(ids_of("b"), [-1.0], "stop", columns={EXPERTS: packed_rows([1], "uint8", [1, 1])})
    with pytest.raises(ValueError, match="no text"):
        log.add_response(generation, BrokenTokenizer())
    assert (log.experts.rows, len(log.added)) == (0, 0)


@pytest.mark.parametrize(
    ("posted", "included", "kept"),
    [
        ({"entropy": ENTROPY}, {}, {}),
        ({"top_logprobs": packed_rows([0, -1], "float32", [2])}, {"top_logprobs": TOP}, {}),
        ({}, {"entropy": ENTROPY}, {}),
        ({"entropy": ENTROPY, "sampling_mask": None}, {"entropy": ENTROPY, "top_logprobs": TOP}, {"entropy": 2}),
    ],
)
def test_a_partial_response_has_columns_with_a_row_for_each_token_alone(
    posted: dict[str, Any], included: dict[str, PackedNumbers], kept: dict[str, int]
) -> None:
    partial = Message(role="assistant", content="a", token_ids=ids_of("a"), generation_logprobs=[-1.0], **posted)
    response = continued(partial, Generation(ids_of("b"), [-1.0], "stop", columns=included), EpisodeRecipe().tokenizer)
    assert len(response.token_ids) == 2
    columns = {name: getattr(response, name) for name in COLUMN_FIELDS}
    assert {name: column.shape[0] for name, column in columns.items() if column is not None} == kept


@pytest.mark.parametrize("said", [{"constrained": True}, {"sampled_with": SampledWith(temperature=0.0)}, {}])
def test_a_part_of_a_response_was_sampled_as_the_whole_one(said: dict[str, Any]) -> None:
    whole = Message(role="assistant", content="ab", token_ids=ids_of("ab"), generation_logprobs=[-1.0, -2.0], **said)
    part = first_tokens_of(whole, 1, EpisodeRecipe().tokenizer)
    assert list(part.token_ids) == ids_of("a")
    assert {name: getattr(part, name) for name in part.model_fields_set & {"constrained", "sampled_with"}} == said


def test_a_journal_keeps_the_numbers_of_a_rollout_that_has_ended() -> None:
    recipe = EpisodeRecipe(include=ALL, max_rollout_turns=1)
    ended = virtual_time.run(_play_sample(recipe.make(), async_context(WholeGenerator(), RandomEnvironment())))
    entry = from_json(turn_entry(0, 0, ended.state()))
    restored = recipe.make()
    restored.restore(_state_of(entry["state"]))
    assert restored.result() == ended.result()


def test_a_journal_keeps_nulls_in_place_of_numbers_that_were_posted() -> None:
    posted = Message(role="assistant", content="a", token_ids=ids_of("a"), generation_logprobs=[-1.0], entropy=None)
    state = EpisodeRecipe(message_log=lambda _: [posted]).make().state()
    [message] = _state_of(from_json(turn_entry(0, 0, state))["state"]).messages
    assert set_fields(message)["entropy"] is None

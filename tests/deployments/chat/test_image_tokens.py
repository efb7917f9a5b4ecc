"""Images in tokenized prompts and observations, by the template of a model that sees."""

from itertools import accumulate, chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import EnvironmentRejected, PromptRejected
from deployments.protocols.chat import ChatOptions, TokenizedObservation
from deployments.protocols.images import ImageTokens, image_spans, name_of_image
from rollout_client.contract.messages import Message, PromptMessage
from tests.paths import TINY_MODEL
from tests.vision_model import vision_tokenizer

TOKENIZER = TransformersChatTokenizer(vision_tokenizer())
IMAGE, FRAME = 262, 263
NAMES = [name_of_image(bytes([number])) for number in range(4)]
KNOWN = {name: ImageTokens(IMAGE, [FRAME, *[IMAGE] * (3 * number + 1), FRAME]) for number, name in enumerate(NAMES, 1)}
PLENTY = 10_000
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)
parts = st.lists(st.sampled_from(NAMES) | texts, max_size=6)


def content(given_parts: list[str]) -> list[dict[str, str]]:
    return [{"type": "image", "image": one} if one in KNOWN else {"type": "text", "text": one} for one in given_parts]


def unexpanded(messages: list[Message]) -> list[int]:
    """The tokens with one placeholder for each image again."""
    ids = list(chain.from_iterable(message.token_ids for message in messages))
    for span in reversed(image_spans(messages)):
        assert ids[span.start : span.end] == [*KNOWN[span.name].token_ids]
        ids[span.start : span.end] = [IMAGE]
    return ids


@given(st.lists(parts, min_size=1, max_size=4))
def test_a_prompts_tokens_are_its_renderings_with_each_image_in_its_place(shown: list[list[str]]) -> None:
    messages = [PromptMessage.model_validate({"role": "user", "content": content(each)}) for each in shown]
    made = TOKENIZER.prompt(messages, ChatOptions(images=KNOWN), PLENTY)
    rendered = vision_tokenizer().apply_chat_template(
        [message.model_dump(exclude_unset=True) for message in messages], add_generation_prompt=True
    )["input_ids"]
    assert unexpanded(made) == rendered
    assert [[place.media for place in message.mm_ranges or ()] for message in made] == [
        [part for part in each if part in KNOWN] for each in shown
    ]
    assert [one.content for one in made] == ["".join(part for part in each if part not in KNOWN) for each in shown]


def observed(messages: list[Any], room: int) -> list[TokenizedObservation]:
    return TOKENIZER.observations(messages, [72, 261], ChatOptions(images=KNOWN), room)


@given(
    st.lists(st.tuples(texts, st.lists(st.sampled_from(NAMES), max_size=3)), min_size=1, max_size=3),
    st.integers(0, 120),
)
def test_an_observation_that_is_cut_keeps_no_part_of_an_image(shown: list[tuple[str, list[str]]], room: int) -> None:
    messages: list[Any] = [
        {"role": "user", "content": text} | ({"images": images} if images else {}) for text, images in shown
    ]
    whole = observed(messages, PLENTY)
    cut = observed(messages, room)
    all_ids, kept = ([*chain.from_iterable(one.token_ids for one in made)] for made in (whole, cut))
    assert kept == all_ids[: len(kept)]
    assert len(kept) <= room
    images = places(whole)
    if len(all_ids) > room:
        # What was left out is the image that the room ends in.
        assert len(kept) == next((start for start, end in images if start < room < end), room)
        assert cut[-1].was_cut
    assert places(cut) == [(start, end) for start, end in images if end <= len(kept)]


def places(made: list[TokenizedObservation]) -> list[tuple[int, int]]:
    """Where the images begin and end among all tokens."""
    pairs = zip(made, accumulate((len(one.token_ids) for one in made), initial=0), strict=False)
    return [(begin + place.start, begin + place.end) for one, begin in pairs for place in one.mm_ranges]


@pytest.mark.parametrize(
    ("shown", "refusal"),
    [
        ([content(["<image>", NAMES[0]])], "writes 2 images of 1 in message 0, of role 'user'"),
        ([content([NAMES[0]]), "<image>"], "stand where none is shown in message 1, of role 'user'"),
    ],
)
def test_a_prompt_that_spells_a_placeholder_is_refused(shown: list[Any], refusal: str) -> None:
    messages = [PromptMessage.model_validate({"role": "user", "content": each}) for each in shown]
    with pytest.raises(PromptRejected, match=refusal):
        TOKENIZER.prompt(messages, ChatOptions(images=KNOWN), PLENTY)


def test_an_observation_that_spells_a_placeholder_shows_no_image_by_it() -> None:
    [one] = observed([{"role": "user", "content": "<image>", "images": [NAMES[0]]}], PLENTY)
    assert [place.media for place in one.mm_ranges] == [NAMES[0]]
    assert one.token_ids.count(IMAGE) == [*KNOWN[NAMES[0]].token_ids].count(IMAGE)
    assert one.content == "<image>"


def test_a_raw_observation_shows_no_image() -> None:
    raw = ChatOptions("raw", images=KNOWN)
    with pytest.raises(
        EnvironmentRejected, match="observation_format 'raw' has no place for it: send observation_format"
    ):
        TOKENIZER.observations([{"role": "user", "content": "", "images": [NAMES[0]]}], [72], raw, PLENTY)


def test_an_empty_list_of_images_shows_a_template_for_texts_alone_a_text() -> None:
    tokenizer = TransformersChatTokenizer.load(str(TINY_MODEL))
    given: Any = {"role": "user", "content": "look"}
    for options in (ChatOptions(), ChatOptions("raw")):
        plain = tokenizer.observations([given], [72], options, PLENTY)
        assert tokenizer.observations([given | {"images": []}], [72], options, PLENTY) == plain


@given(st.lists(parts.filter(bool), min_size=1, max_size=3))
def test_parts_after_an_answer_are_those_of_a_rendering_in_order(shown: list[list[str]]) -> None:
    messages: list[Any] = [{"role": "user", "content": content(each)} for each in shown]
    made = TOKENIZER.observations(messages, [72, 261], ChatOptions(), PLENTY)
    rendered = vision_tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    # The answer has the end of its turn, without the line break after it.
    assert [*chain.from_iterable(one.token_ids for one in made)] == [10, *rendered]
    assert [one.token_ids.count(IMAGE) for one in made] == [sum(part in KNOWN for part in each) for each in shown]


def test_a_template_that_leaves_out_the_text_beside_an_image_is_refused() -> None:
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("else part['text']", "else ''")
    blind = TransformersChatTokenizer(tokenizer)
    messages: list[Any] = [{"role": "user", "content": content([NAMES[0], "Look"])}]
    with pytest.raises(EnvironmentRejected, match="drops messages of role 'user' after an answer"):
        blind.observations(messages, [72, 261], ChatOptions(), PLENTY)
    [alone] = blind.observations([{"role": "user", "content": content([NAMES[0]])}], [72, 261], ChatOptions(), PLENTY)  # type: ignore[typeddict-item]
    assert alone.token_ids.count(IMAGE) == 1

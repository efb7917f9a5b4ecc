"""What holds for every session that shows images: each is expanded once, and names and ranges come back."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import PromptRejected
from deployments.protocols.images import ImageTokens, name_of_image
from deployments.sessions.codec import call_entry, call_of
from deployments.sessions.records import NO_PLAN, ChatContext, ChatMessage, SessionRenderer, images_in, prepared_prompt
from deployments.sessions.samples import samples_of
from deployments.sessions.session_record import SessionRecord
from rollout_client.contract.sessions import SessionSample
from tests.deployments.sessions.harness import FakeEngine, Reply

PLACEHOLDER, ENDS, BEGINS_ANSWER = 256, 257, 258
NAMES = [name_of_image(bytes([number])) for number in range(3)]
IMAGES = {
    name: ImageTokens(PLACEHOLDER, [300, *[PLACEHOLDER] * (number + 1), 301 + number])
    for number, name in enumerate(NAMES)
}
PLAIN = ChatContext()


class ByteRenderer(SessionRenderer):
    """Writes bytes, a placeholder for each image, and an end after each message."""

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()

    def prompt(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[Sequence[int]]:
        *before, last = (self._ids(message) for message in messages)
        return [*before, [*last, BEGINS_ANSWER]]

    def following(
        self,
        messages: Sequence[ChatMessage],
        after: Sequence[int],
        context: ChatContext,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[Sequence[int]]:
        first, *rest = self.prompt(messages, context)
        return [[ENDS, *first], *rest]

    def generation_prompt(self, context: ChatContext) -> Sequence[int]:
        return [BEGINS_ANSWER]

    def _ids(self, message: ChatMessage) -> list[int]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        ids = [
            id_
            for part in parts
            for id_ in ([PLACEHOLDER] if part["type"] == "image" else part["text"].encode("latin-1"))
        ]
        return ids if message["role"] == "assistant" else [*ids, ENDS]


def engine_with(images: Mapping[str, ImageTokens]) -> FakeEngine:
    renderer: Any = ByteRenderer()
    return FakeEngine(renderer, is_parsed=False, images=images)


parts = st.lists(
    st.one_of(
        st.sampled_from(NAMES).map(lambda name: {"type": "image", "image": name}),
        st.text("ab", min_size=1, max_size=3).map(lambda text: {"type": "text", "text": text}),
    ),
    min_size=1,
    max_size=5,
)


def ids_of(messages: Sequence[Any]) -> list[int]:
    """The ids of a conversation that ends with a message of the user, with those of its images."""
    ids: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            ids += message["content"].encode()
            continue
        ids += [ENDS] if number else []
        for part in message["content"]:
            ids += IMAGES[part["image"]].token_ids if part["type"] == "image" else part["text"].encode()
        ids += [ENDS, BEGINS_ANSWER]
    return ids


def ranges_of(sample: SessionSample) -> list[list[Any]]:
    return [list(message.mm_ranges or ()) for message in sample.message_log]


@given(st.lists(st.tuples(parts, st.booleans()), min_size=1, max_size=6))
def test_a_prompt_is_the_expanded_conversation_whatever_it_continues(turns: list[Any]) -> None:
    engine, read = engine_with(IMAGES), SessionRecord()
    messages: list[Any] = []
    for number, (content, forks) in enumerate(turns):
        # A fork begins before the last question.
        messages = [*(messages[:-2] if forks else messages), {"role": "user", "content": content}]
        prepared = engine.prepare(messages)
        prompt = prepared.prompt
        assert list(prompt.token_ids) == ids_of(messages)
        assert [span.name for span in prompt.images] == [name for message in messages for name in images_in(message)]
        for span in prompt.images:
            assert list(prompt.token_ids[span.start : span.end]) == list(IMAGES[span.name].token_ids)
        [made] = engine.finish(prepared, Reply(f"answer {number}", is_cut=True))
        read.add(call_of(call_entry(engine.calls[-1])))
        messages = [*messages, made.message]
    samples = samples_of("s", engine.record)
    for sample in samples:
        for message in sample.message_log:
            for place in message.mm_ranges or ():
                assert list(message.token_ids[place.start : place.end]) == list(IMAGES[place.media].token_ids)
    assert [ranges_of(sample) for sample in samples] == [ranges_of(sample) for sample in samples_of("s", read)]


def test_images_of_equal_tokens_are_different_messages() -> None:
    engine = engine_with({**IMAGES, NAMES[1]: IMAGES[NAMES[0]]})
    for name in NAMES[:2]:
        engine.call([{"role": "user", "content": [{"type": "image", "image": name}]}], Reply("A", is_cut=True))
    first, second = samples_of("s", engine.record)
    assert first.message_log[0].token_ids == second.message_log[0].token_ids
    shown = [[place.media for place in sample.message_log[0].mm_ranges or ()] for sample in (first, second)]
    assert shown == [[NAMES[0]], [NAMES[1]]]
    assert second.shared_messages == []


def test_an_image_that_the_template_leaves_out_is_refused() -> None:
    class Dropping(ByteRenderer):
        def prompt(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[Sequence[int]]:
            return [[1, 2, BEGINS_ANSWER] for _ in messages]

    messages = [{"role": "system", "content": [{"type": "image", "image": NAMES[0]}]}]
    with pytest.raises(PromptRejected, match="writes 0 images of 1 in a message of role 'system': show images in"):
        prepared_prompt(NO_PLAN, messages, PLAIN, Dropping(), IMAGES)

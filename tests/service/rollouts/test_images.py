"""Images in the rollout loop: asked for once, in the log from then on, and named by their places to the engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import GenerationLost, GenerationRejected
from deployments.protocols.chat import ChatOptions
from deployments.protocols.generation import GenerationRequest
from deployments.protocols.images import ImageSpan, ImageTokens, name_of_image
from rollout_client.contract.messages import MediaRange, Message, PromptMessage
from rollout_env import StepOutcome
from service.rollouts.episode import Episode
from service.rollouts.loop import RolloutContext, _play_sample
from service.rollouts.messages import ImageReader
from service.rollouts.pacing import Schedule
from tests import virtual_time
from tests.service.rollouts.playing import error_of
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator
from tests.vision_model import vision_tokenizer

TOKENIZER = TransformersChatTokenizer(vision_tokenizer())
IMAGE, FRAME = 262, 263
NAMES = [name_of_image(bytes([number])) for number in range(5)]
TOKENS = {name: ImageTokens(IMAGE, [FRAME, *[IMAGE] * (number + 2), FRAME]) for number, name in enumerate(NAMES)}


@dataclass
class SeeingGenerator(ScriptedGenerator):
    """Has the tokens of `TOKENS`; raises the failures first."""

    failures: list[Exception] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def image_tokens(self, names: Sequence[str]) -> list[ImageTokens]:
        self.asked += names
        await asyncio.sleep(0.01)
        if self.failures:
            raise self.failures.pop(0)
        return [TOKENS[name] for name in names]


def outcome(text: str, images: list[str]) -> StepOutcome:
    message: Any = {"role": "user", "content": text} | ({"images": images} if images else {})
    return StepOutcome(message, 1.0, False)


def recipe(prompt: Sequence[str], **fields: Any) -> EpisodeRecipe:
    parts = [{"type": "text", "text": "Look"}, *({"type": "image", "image": name} for name in prompt)]
    messages = [PromptMessage.model_validate({"role": "user", "content": parts})]
    log = TOKENIZER.prompt(messages, ChatOptions(images=TOKENS), 1000)
    return EpisodeRecipe(
        message_log=lambda _: log, tokenizer=TOKENIZER, observation_format="chat", max_new_tokens=4, **fields
    )


def play(recipe: EpisodeRecipe, generator: ScriptedGenerator, *outcomes: StepOutcome) -> Episode:
    images = ImageReader(generator) if isinstance(generator, SeeingGenerator) else None
    context = RolloutContext(generator, {"task": ScriptedEnvironment(outcomes)}, Schedule(), images=images)
    return virtual_time.run(_play_sample(recipe.make(), context))


def check_places(requests: Sequence[GenerationRequest], shown: Sequence[Sequence[str]]) -> None:
    """Each generation begins with the one before, and has its images where their tokens are."""
    before: list[int] = []
    for request, names in zip(requests, shown, strict=True):
        ids = list(request.prompt_token_ids)
        assert ids[: len(before)] == before
        assert [span.name for span in request.images] == names
        assert [ids[span.start : span.end] for span in request.images] == [[*TOKENS[name].token_ids] for name in names]
        assert ids.count(IMAGE) == sum([*TOKENS[name].token_ids].count(IMAGE) for name in names)
        before = ids


@pytest.mark.slow
@given(st.lists(st.lists(st.sampled_from(NAMES), max_size=3), min_size=1, max_size=5))
def test_each_generation_has_the_images_of_all_messages_before_it(shown: list[list[str]]) -> None:
    prompt, *observed = shown
    generator = SeeingGenerator(["ab"])
    # The images of the prompt were learned before it was tokenized.
    looking = recipe(prompt, images={name: TOKENS[name] for name in prompt}, max_rollout_turns=len(observed) + 1)
    outcomes = [outcome(f"turn {turn}", images) for turn, images in enumerate([*observed, []])]
    assert play(looking, generator, *outcomes).status == "max_turns"
    check_places(generator.requests, [list(chain(*shown[: turn + 1])) for turn in range(len(shown))])
    assert sorted(generator.asked) == sorted({*chain(*observed)} - {*prompt})


def test_an_image_within_a_posted_response_has_one_place() -> None:
    shown = MediaRange(media=NAMES[0], start=1, end=5)
    response = {"role": "assistant", "content": "a", "token_ids": [72, *TOKENS[NAMES[0]].token_ids]}
    log = [
        Message(role="user", content="Look", token_ids=[71]),
        Message.model_validate(response | {"generation_logprobs": [0.0] * 5, "mm_ranges": [shown]}),
    ]
    made = EpisodeRecipe(message_log=lambda _: log, tokenizer=TOKENIZER)
    episode = made.make()
    assert episode.log.images == (ImageSpan(NAMES[0], 2, 6),)
    taken_up = made.make()
    taken_up.restore(episode.state())
    assert taken_up.log.images == episode.log.images


def test_images_are_asked_for_again_when_the_engine_was_lost() -> None:
    generator = SeeingGenerator(["ab"], failures=[GenerationLost("The replica died.")])
    again = play(recipe([], max_rollout_turns=2, retries=1), generator, outcome("look", NAMES[:1]))
    assert (again.status, generator.asked) == ("max_turns", [NAMES[0]] * 2)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (SeeingGenerator(["ab"], failures=[GenerationRejected("It is no picture.")]), "It is no picture."),
        (ScriptedGenerator(["ab"]), "The model takes no images, and 2 are shown to it: serve a model that sees."),
    ],
)
def test_a_model_that_cannot_see_what_is_shown_fails_the_rollout(generator: ScriptedGenerator, message: str) -> None:
    failed = play(recipe([], max_rollout_turns=2, retries=1), generator, outcome("look", NAMES[:2]))
    assert error_of(failed.result())["message"] == message


async def test_requests_that_wait_for_one_image_share_the_answer() -> None:
    reader = ImageReader(generator := SeeingGenerator([""]), most_known=1)
    leaving, staying, later = dict[str, ImageTokens](), dict[str, ImageTokens](), dict[str, ImageTokens]()
    first = asyncio.create_task(reader.learn(NAMES[:1], leaving))
    second = asyncio.create_task(reader.learn(NAMES[:2], staying))
    await asyncio.sleep(0)
    first.cancel()
    await second
    await reader.learn(NAMES[1:2], later)
    with pytest.raises(asyncio.CancelledError):
        await first
    await reader.learn(NAMES[:1], leaving)
    assert staying == {name: TOKENS[name] for name in NAMES[:2]}
    assert leaving == {NAMES[0]: TOKENS[NAMES[0]]}
    # The first was dropped for the second: one image is known at a time.
    assert generator.asked == [NAMES[0], NAMES[1], NAMES[0]]

"""Images in calls through vLLM's own layers: expanded once, recorded by name, continued, and refused in a sentence."""

import json
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image
from transformers import AutoProcessor

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.generation.engine import VLLMEngine
from deployments.generation.engine_images import EngineImages
from deployments.protocols.chat import ChatOptions
from deployments.protocols.images import ImageSpan, ImageTokens
from deployments.protocols.model_server import Endpoint
from deployments.upstream.vllm.engine_progress import StepCounter
from rollout_client.contract.messages import MediaRange, Message, PromptMessage
from rollout_client.contract.rollouts import SampleResult
from rollout_client.tensors import image_inputs, to_tensors
from tests.clients.scripted_service import result
from tests.deployments.generation.serving.vllm_layers import ScriptedCore, ServedEngine
from tests.fakes.image_store import ImagesInProcess
from tests.virtual_time import runs
from tests.vision_model import picture, save_vision_model

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


@lru_cache
def folder() -> Path:
    return save_vision_model(Path(mkdtemp()))


class SeeingCore(ScriptedCore):
    def __init__(self) -> None:
        super().__init__(folder())
        self.given: list[Any] = []

    def generate(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
        self.given.append(prompt)
        return super().generate(prompt, *arguments, **options)


class Seeing(ServedEngine):
    """vLLM's layers over a model that sees, with images in this process."""

    def __init__(self) -> None:
        self.core = SeeingCore()
        unchecked: Any = self.core
        engine = VLLMEngine(unchecked, StepCounter())
        self.images = ImagesInProcess()
        engine.images = EngineImages(unchecked, self.images)
        super().__init__(engine)

    async def show(self, *sizes: tuple[int, int]) -> list[str]:
        return await self.images.put([picture(*size, seed=1) for size in sizes])

    def reply(self, text: str) -> list[int]:
        tokenizer = self.core.get_tokenizer()
        self.core.replies.append([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
        return self.core.replies[-1]

    async def rollout_prompt(self, messages: list[Any]) -> list[Message]:
        """As `POST /rollout` tokenizes the messages, in its own form."""
        prompt = [PromptMessage.model_validate(message) for message in messages]
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        names = [part["image"] for part in parts if part["type"] == "image"]
        known: dict[str, ImageTokens] = dict(zip(names, await self.engine.image_tokens(names), strict=True))
        tokenizer = TransformersChatTokenizer.load(str(folder()))
        return tokenizer.prompt(prompt, ChatOptions(images=known), 512)


def openai(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def shown_to_engine(prompt: Any) -> list[tuple[str, int, int]]:
    places = prompt["mm_placeholders"]["image"]
    names = prompt["mm_hashes"]["image"]
    return [(name, place.offset, place.offset + place.length) for name, place in zip(names, places, strict=True)]


@runs
async def test_a_call_with_images_has_the_ids_of_a_rollout_and_is_continued() -> None:
    served = await Seeing().open()
    small, wide = await served.show((40, 30), (100, 40))
    first = [{"role": "user", "content": [text("Look: "), openai(small), text(" and "), openai(wide)]}]
    reply = served.reply("Blue")
    status, answer = await served.answer("chat/completions", {"messages": first, "max_tokens": 9}, "s")
    assert status == 200, answer
    parts = [text("Look: "), {"type": "image", "image": small}, text(" and "), {"type": "image", "image": wide}]
    [expected] = await served.rollout_prompt([{"role": "user", "content": parts}])
    assert served.core.prompts == [expected.token_ids]
    assert [place for place, _, _ in shown_to_engine(served.core.given[0])] == [small, wide]

    served.reply("Red")
    answered = {"role": "assistant", "content": "Blue"}
    more = [*first, answered, {"role": "user", "content": [text("And "), openai(small), text(" now?")]}]
    status, answer = await served.answer("chat/completions", {"messages": more, "max_tokens": 9}, "s")
    assert status == 200, answer
    begins = [*expected.token_ids, *reply]
    assert served.core.prompts[1][: len(begins)] == begins
    places = shown_to_engine(served.core.given[1])
    assert [name for name, _, _ in places] == [small, wide, small]
    [tokens] = await served.engine.image_tokens([small])
    encode = partial(served.core.get_tokenizer().encode, add_special_tokens=False)
    assert served.core.prompts[1][len(begins) :] == [
        *encode("\n<|user|>\nAnd "),
        *tokens.token_ids,
        *encode(" now?<|end|>\n<|assistant|>\n"),
    ]
    assert [served.core.prompts[1][start:end] for name, start, end in places if name == small] == [
        list(tokens.token_ids)
    ] * 2

    [sample] = await served.samples()
    media = [[place.media for place in message.mm_ranges or ()] for message in sample.message_log]
    assert media == [[small, wide], [], [small], []]
    assert [id_ for message in sample.message_log for id_ in message.token_ids][: len(served.core.prompts[1])] == (
        served.core.prompts[1]
    )
    assert sample.message_log[0].content == "Look:  and "
    assert expected.mm_ranges == sample.message_log[0].mm_ranges
    assert (await served.store.drift("s", "")).drift == []


def file_of(shown: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    shown.save(file, form, **options)
    return file.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


def drawn(mode: str) -> Image.Image:
    """Red above blue, with a transparent corner where the mode has one."""
    shown = Image.new("RGBA", (40, 30), "red")
    shown.paste("blue", (0, 15, 40, 30))
    shown.paste((0, 0, 0, 0), (0, 0, 10, 10))
    return shown.convert(mode)


@pytest.mark.parametrize(
    "file",
    [
        file_of(drawn("RGB"), "JPEG", exif=turned()),
        file_of(drawn("RGBA"), "WEBP", lossless=True),
        file_of(drawn("LA")),
        file_of(drawn("RGB"), transparency=(255, 0, 0)),
        file_of(drawn("P"), transparency=0),
    ],
    ids=["turned", "webp", "la", "one-color", "palette"],
)
@runs
async def test_a_trainer_gives_the_model_the_pixels_that_the_engine_gives_it(file: bytes) -> None:
    served = await Seeing().open()
    [name] = await served.images.put([file])
    assert served.engine.images is not None
    [tokens] = await served.engine.images.tokens([name])
    span = ImageSpan(name, 0, len(tokens.token_ids))
    prompt = await served.engine.images.prompt([*tokens.token_ids], [span])
    [given] = prompt["mm_kwargs"]["image"]
    assert given is not None
    shown = [MediaRange(media=name, start=0, end=len(tokens.token_ids))]
    log = [
        Message(role="user", content="", token_ids=[*tokens.token_ids], mm_ranges=shown),
        Message(role="assistant", content="", token_ids=[7], generation_logprobs=[-0.5], finish_reason="stop"),
    ]
    sample = SampleResult.model_validate(result(0, 0, message_log=[message.model_dump() for message in log]))
    tensors = to_tensors([sample], pad_token_id=0)
    processor = AutoProcessor.from_pretrained(folder())  # type: ignore[no-untyped-call]
    inputs = image_inputs([sample], tensors, {name: file}, processor)
    seen: Any = given["pixel_values"].data
    assert torch.equal(inputs["pixel_values"][0].to(seen.dtype), seen)


@runs
async def test_the_apis_show_and_count_the_same_prompt() -> None:
    served = await Seeing().open()
    [name] = await served.show((40, 30))

    def asking(**image: Any) -> dict[str, Any]:
        return {"model": folder().name, "messages": [{"role": "user", "content": [text("Look"), image]}]}

    chat, message = asking(**openai(name)), asking(type="image", source={"type": "url", "url": name})
    calls: list[tuple[Endpoint, dict[str, Any], str | None]] = [
        ("chat/completions", chat, "s"),
        ("messages", message, "s"),
        ("chat/completions", chat, None),
    ]
    for endpoint, body, session in calls:
        served.reply("Blue")
        status, answer = await served.answer(endpoint, {**body, "max_tokens": 9}, session)
        assert status == 200, answer
    first, *others = served.core.prompts
    assert others == [first] * 2
    assert (await served.answer("messages/count_tokens", message))[1]["input_tokens"] == len(first)
    assert (await served.answer("tokenize", chat))[1]["tokens"] == first


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


SMALL = openai("small")
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = [user(text("Hi")), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
REFUSED: dict[str, list[dict[str, Any]]] = {
    "template writes 2 images of 1 in a message of role 'user'": [user(text("<image>"), SMALL)],
    "stand where none is shown in a message of role 'system'": [
        {"role": "system", "content": "An <image>."},
        user(SMALL),
    ],
    "has a part that is neither a text nor an image: leave it out.": [user(openai("https://example.org/a.png"))],
    "A message of role 'tool' shows no images: show them in one of role 'user'.": [
        *CALLED,
        {"role": "tool", "tool_call_id": "a", "content": [SMALL]},
    ],
    "is not kept any more: upload it again": [user(openai("sha256:" + "0" * 64))],
}


@pytest.mark.parametrize("sentence", REFUSED)
@pytest.mark.parametrize("session", ["s", None])
@runs
async def test_what_cannot_be_shown_is_refused_in_a_sentence(sentence: str, session: str | None) -> None:
    served = await Seeing().open()
    [small] = await served.show((40, 30))
    given = json.loads(json.dumps(REFUSED[sentence]).replace('"small"', json.dumps(small)))
    status, answer = await served.answer("chat/completions", {"messages": given, "max_tokens": 9}, session)
    assert (status, sentence in answer["error"]["message"]) == (400, True)
    assert await served.samples() == []
    assert served.core.given == []

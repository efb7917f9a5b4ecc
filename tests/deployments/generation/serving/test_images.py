"""Images in calls through vLLM's own layers: the pixels that the engine gets, and what is refused in a sentence."""

import json
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image
from transformers import AutoProcessor

from deployments.generation.engine import VLLMEngine
from deployments.generation.engine_images import EngineImages
from deployments.protocols.images import ImageSpan
from deployments.upstream.vllm.engine_progress import StepCounter
from rollout_client.contract.messages import MediaRange, Message
from rollout_client.contract.rollouts import SampleResult
from rollout_client.tensors import image_inputs, to_tensors
from tests.clients.scripted_service import result
from tests.deployments.generation.serving.vllm_layers import ScriptedCore, ServedEngine
from tests.fakes.image_store import ImagesInProcess
from tests.vision_model import picture, save_vision_model

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]


@lru_cache
def folder() -> Path:
    return save_vision_model(Path(mkdtemp()))


class Seeing(ServedEngine):
    """vLLM's layers over a model that sees, with images in this process."""

    def __init__(self) -> None:
        self.core = ScriptedCore(folder())
        unchecked: Any = self.core
        engine = VLLMEngine(unchecked, StepCounter())
        self.images = ImagesInProcess()
        engine.images = EngineImages(unchecked, self.images)
        super().__init__(engine)

    async def show(self, *sizes: tuple[int, int]) -> list[str]:
        return await self.images.put([picture(*size, seed=1) for size in sizes])


def openai(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


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
async def test_a_trainer_gives_the_model_the_pixels_that_the_engine_gives_it(file: bytes) -> None:
    served = await Seeing().open()
    [name] = await served.images.put([file])
    assert served.engine.images is not None
    [tokens] = await served.engine.images.tokens([name])
    span = ImageSpan(name, 0, len(tokens.token_ids))
    [given] = (await served.engine.images.prompt([*tokens.token_ids], [span]))["mm_kwargs"]["image"]
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
async def test_what_cannot_be_shown_is_refused_in_a_sentence(sentence: str, session: str | None) -> None:
    served = await Seeing().open()
    [small] = await served.show((40, 30))
    given = json.loads(json.dumps(REFUSED[sentence]).replace('"small"', json.dumps(small)))
    status, answer = await served.answer("chat/completions", {"messages": given, "max_tokens": 9}, session)
    assert (status, sentence in answer["error"]["message"]) == (400, True)
    assert await served.samples() == []
    assert served.core.prompts == []

"""Images in the engine's prompts: processed once by the model's processor, and placed by their ranges of tokens.

vLLM would expand a placeholder in each prompt anew. Here its processor gets an image alone: what it writes for the
placeholder are the image's tokens in every log, and what it computes of the pixels goes with each prompt that shows it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from io import BytesIO
from time import monotonic
from typing import Any

import torch
from PIL import Image
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.failures import GenerationRejected, ImagesLost
from deployments.images.book import ImageUnknown
from deployments.protocols.generation import packed_ids
from deployments.protocols.images import ImageSpan, ImageStore, ImageTokens
from deployments.rpc.background_tasks import BackgroundTasks, SharedCalls

_KEPT_BYTES = 2**30
"""Memory for processed images; those that were not used for longest are dropped first."""
_USED_EVERY_S = 300.0
"""An image that prompts show is read from the store again after so long: there it counts as used."""


_DUMMY = Image.linear_gradient("L").resize((64, 64)).convert("RGB")


class ImagesUnsupported(Exception):
    """The model's processor writes images in a way that cannot be carried token-exactly."""


@dataclass(slots=True)
class _ProcessedImage:
    """An image as the model takes it."""

    tokens: ImageTokens
    is_embed: torch.Tensor | None
    """Which of its tokens the model replaces by what it sees; `None`: all."""
    values: Any
    """The pixels, and what else the model's processor made of them."""
    bytes: int
    read_at: float = field(default_factory=monotonic)
    """When it was read from the store last."""

    @property
    def seen_ids(self) -> set[int]:
        ids = self.tokens.token_ids
        return {*ids} if self.is_embed is None else {ids[place] for place in self.is_embed.nonzero()[:, 0].tolist()}


class EngineImages:
    """Images of the prompts of one engine, whose model sees."""

    def __init__(self, llm: AsyncLLM, store: ImageStore) -> None:
        """Processes a dummy image, which takes a second.

        Raises:
            ImagesUnsupported: the model sees no images, has no placeholder of one token for an image, or attends within
                images in a way that this build of vLLM leaves out.
        """
        if not llm.model_config.is_multimodal_model:
            raise ImagesUnsupported(f"{llm.model_config.model} sees no images: leave images out of the config.")
        if llm.model_config.is_mm_prefix_lm and current_platform.is_cpu():
            raise ImagesUnsupported(
                f"The tokens of an image attend to those behind them in {llm.model_config.model}, which vLLM's build "
                "for processors leaves out: log-probabilities would not be the model's. Serve it on a GPU, or leave "
                "images out of the config."
            )
        self._processor = llm.renderer.get_mm_processor()
        self._tokenizer = llm.get_tokenizer()
        self._store = store
        self._thread = ThreadPoolExecutor(1, "images")
        self._processed: OrderedDict[str, _ProcessedImage] = OrderedDict()
        self._kept = 0
        self._tasks = BackgroundTasks()
        self._reading = SharedCalls(self._read)
        text = self._processor.dummy_inputs.get_dummy_text({"image": 1})
        self._prompt: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        made, place = self._applied(_DUMMY, "dummy")
        self._placeholder = self._placeholder_of(made, place)
        dummy = self._processed_image(made, place)
        self.token_ids = tuple(sorted({self._placeholder, *dummy.seen_ids}))
        """The placeholder, and the tokens that the model replaces by what it sees."""

    async def tokens(self, names: Sequence[str]) -> list[ImageTokens]:
        """The tokens of images of the store.

        Raises:
            ImagesLost: the store cannot be reached.
            GenerationRejected: the store has one of them no longer, or the model's processor refuses it.
        """
        return [image.tokens for image in await asyncio.gather(*map(self._image, names))]

    async def prompt(
        self, token_ids: Sequence[int], spans: Sequence[ImageSpan], cache_salt: str | None = None
    ) -> MultiModalInput:
        """The engine's input for a prompt with these images. Raises what `tokens` raises.

        `GenerationRejected` also if the prompt has other tokens in the place of an image than the model writes for it.
        """
        shown = await asyncio.gather(*(self._image(span.name) for span in spans))
        for span, image in zip(spans, shown, strict=True):
            if [*token_ids[span.start : span.end]] != [*image.tokens.token_ids]:
                raise GenerationRejected(
                    f"The tokens [{span.start}, {span.end}) of the prompt are not those that the model has for image "
                    f"{span.name}: send tokens and mm_ranges of the model that is served."
                )
        return mm_input(
            list(token_ids),
            MultiModalKwargsItems({"image": [image.values for image in shown]}),
            {"image": [span.name for span in spans]},
            {
                "image": [
                    PlaceholderRange(offset=span.start, length=span.end - span.start, is_embed=image.is_embed)
                    for span, image in zip(spans, shown, strict=True)
                ]
            },
            cache_salt=cache_salt,
        )

    async def _image(self, name: str) -> _ProcessedImage:
        if (image := self._processed.get(name)) is not None:
            self._processed.move_to_end(name)
            if monotonic() - image.read_at > _USED_EVERY_S:
                image.read_at = monotonic()
                self._tasks.start(self._use(name), Context())
            return image
        return await self._reading.result(name)

    async def _use(self, name: str) -> None:
        """Lets the store know that an image is in use, which would go for others in time."""
        with suppress(ImageUnknown, ImagesLost):
            await self._store.get(name)

    async def _read(self, name: str) -> _ProcessedImage:
        try:
            data = await self._store.get(name)
        except ImageUnknown as unknown:
            raise GenerationRejected(f"Image {name} is not kept any more: upload it again.") from unknown
        loop = asyncio.get_running_loop()
        try:
            image = await loop.run_in_executor(self._thread, self._process, data, name)
        except (OSError, ValueError, RuntimeError) as error:
            raise GenerationRejected(f"The model's processor refuses image {name}: {error}") from error
        self._processed[name] = image
        self._kept += image.bytes
        while self._kept > _KEPT_BYTES and len(self._processed) > 1:
            self._kept -= self._processed.popitem(last=False)[1].bytes
        return image

    def _process(self, data: bytes, name: str) -> _ProcessedImage:
        with Image.open(BytesIO(data)) as picture:
            # As the file has it: vLLM turns it upright, lays it on white where it is transparent, and makes it RGB. So
            # does `image_inputs` of the client.
            return self._processed_image(*self._applied(picture, name))

    def _processed_image(self, made: Any, place: PlaceholderRange) -> _ProcessedImage:
        ids = made["prompt_token_ids"][place.offset : place.offset + place.length]
        values = made["mm_kwargs"]["image"][0]
        tensors = (element.data for element in values.values())
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        return _ProcessedImage(ImageTokens(self._placeholder, packed_ids(ids)), place.is_embed, values, size)

    def _applied(self, picture: Image.Image, name: str) -> tuple[Any, PlaceholderRange]:
        items = self._processor.info.parse_mm_data({"image": [picture]})
        inputs = ProcessorInputs([*self._prompt], items, {"image": [name]})
        made = self._processor.apply(inputs, TimingContext(enabled=False))
        [place] = made["mm_placeholders"]["image"]
        return made, place

    def _placeholder_of(self, made: Any, place: PlaceholderRange) -> int:
        """The token in whose place the processor has written an image."""
        behind = len(made["prompt_token_ids"]) - place.offset - place.length
        replaced = self._prompt[place.offset : len(self._prompt) - behind]
        if len(replaced) != 1:
            raise ImagesUnsupported(
                f"The model's processor writes an image in the place of {len(replaced)} tokens {replaced}; only models "
                "with one token for an image are served with images. Leave images out of the config."
            )
        return replaced[0]

    def close(self) -> None:
        self._thread.shutdown(wait=False)

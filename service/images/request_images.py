"""The images of a request: each data URL becomes the name of an image that the store keeps.

Guarantee: all images of a request are checked before the first of them is kept; one that is refused keeps none.
"""

import asyncio
import binascii
import re
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TypeVar

from deployments.images.checks import ImageChecks, format_of, refuse_bytes
from deployments.images.failures import ImageRefused, image_unknown
from deployments.images.settings import ImagesSettings
from deployments.protocols.images import ImageStore, name_of_image
from rollout_client.contract.blobs import BlobInfo
from rollout_client.contract.messages import ContentPart, ImagePart
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest, SampleInput
from service.access.keys import ANYBODY, Caller
from service.problems import MOST_PROBLEMS, RequestProblem, dotted, invalid_request, shown

DATA_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,")
LONGEST_DATA_URL_HEAD = 40
NAME_PREFIX = "sha256:"
MOST_SAMPLES_READ_INLINE = 64
Value = TypeVar("Value")
Location = tuple[str | int, ...]
Source = tuple[str, Location]
"""An image as the request has it, and its place there."""
NOT_KEPT = "there is no such image: it has expired, or it is another key's; upload it again"
NOT_TAKEN = (
    "the service takes no images; leave it out, or serve a model that takes them, with `images: {}` in the config"
)
MODEL_TAKES_NONE = "the model that is served takes no images; leave it out, or serve a model that takes them"


class RequestImages:
    """Images that come into one ingress replica, in requests or by themselves.

    Args:
        takes_images: whether the model does; requests may show none to another one.
    """

    def __init__(self, store: ImageStore, settings: ImagesSettings, takes_images: bool = True) -> None:
        self.store = store
        self.settings = settings
        self._takes_images = takes_images
        self._checks = ImageChecks(settings)
        # Decoding base64 holds the interpreter's lock for milliseconds: the event loop waits for one thread, not all.
        self._decoding = asyncio.Lock()

    async def upload(self, data: bytes, caller: Caller = ANYBODY) -> BlobInfo:
        """Checks and keeps one image.

        Raises:
            RequestProblem: 422, it is not an image that the service takes.
            ImagesFull, ImagesLost: it could not be kept.
        """
        try:
            info = await self._checks.checked(data)
        except ImageRefused as refused:
            raise invalid_request(FieldProblem(field="body", message=str(refused))) from refused
        [name] = await self.store.put([data], caller.name)
        return BlobInfo(
            name=name,
            bytes=len(data),
            media_type=info.media_type,
            width=info.size.width,
            height=info.size.height,
            expires_at=datetime.now(UTC) + timedelta(seconds=self.settings.keep_s),
        )

    async def download(self, name: str, caller: Caller = ANYBODY) -> tuple[bytes, str]:
        """The content of an image, and its media type; raises `ImageUnknown`, also for one of another key."""
        if await self.store.refused([name], caller.name):
            raise image_unknown(name)
        data = await self.store.get(name)
        found = format_of(data)
        assert found is not None
        return data, found.media_type

    async def named(self, request: RolloutRequest, caller: Caller = ANYBODY) -> RolloutRequest:
        """The request with each image by its name: the very request if it shows none, else a copy.

        Raises:
            RequestProblem: 422 with the first `MOST_PROBLEMS` images that cannot be taken. Nothing was kept.
            ImagesFull, ImagesLost: they could not be kept.
        """
        sources = await _read_beside_others(request)
        _refuse_too_many(sources, self.settings.max_images)
        names = await self.names_of(sources, caller)
        return _with_names(request, sources, names) if names else request

    async def named_sample(self, sample: SampleInput, caller: Caller = ANYBODY) -> SampleInput:
        """As `named`, for the sample of a session."""
        sources = list(_sources_of(sample, ("sample",)))
        _refuse_too_many(sources, self.settings.max_images)
        names = await self.names_of(sources, caller)
        return _sample_with_names(sample, names) if names else sample

    async def names_of(self, sources: Sequence[Source], caller: Caller = ANYBODY) -> dict[str, str]:
        """Keeps what is not named yet, and returns the names of that, by data URL; raises as `named`.

        What the caller has here already, as an agent that sends its conversation again with each call, is neither
        checked nor sent to the store once more.
        """
        if not sources:
            return {}
        if not self._takes_images:
            raise none_taken(sources, MODEL_TAKES_NONE)
        # Hashing takes a millisecond for a megabyte, once for each text.
        each = await asyncio.to_thread(lambda: dict.fromkeys(source for source, _ in sources))
        contents = {url: await _or_refusal(self._decode(url)) for url in each if not _is_name(url)}
        read = {url: content for url, content in contents.items() if isinstance(content, bytes)}
        names = await asyncio.to_thread(lambda: {url: name_of_image(data) for url, data in read.items()})
        asked = list(dict.fromkeys([*filter(_is_name, each), *names.values()]))
        unknown = set(await self.store.refused(asked, caller.name) if asked else ())
        new = {source: data for source, data in read.items() if names[source] in unknown}
        checked = zip(
            new, await asyncio.gather(*(_or_refusal(self._checks.checked(data)) for data in new.values())), strict=True
        )
        refusals = {source: str(content) for source, content in contents.items() if isinstance(content, ImageRefused)}
        refusals |= {source: str(refusal) for source, refusal in checked if isinstance(refusal, ImageRefused)}
        refusals |= {name: NOT_KEPT for name in each if name in unknown}
        if refusals:
            raise _refused([(source, place) for source, place in sources if source in refusals], refusals)
        if new:
            await self.store.put([*new.values()], caller.name)
        return names

    async def _decode(self, url: str) -> bytes:
        """Raises `ImageRefused`."""
        async with self._decoding:
            return await asyncio.to_thread(_decoded, url, self.settings)


async def _or_refusal(value: Awaitable[Value]) -> Value | ImageRefused:
    """The value, or why the image is not taken."""
    try:
        return await value
    except ImageRefused as refusal:
        return refusal


def _is_name(source: str) -> bool:
    return source.startswith(NAME_PREFIX)


async def refuse_images(request: RolloutRequest) -> None:
    """For a service without images. Raises `RequestProblem` (422) with the first `MOST_PROBLEMS` images."""
    if sources := await _read_beside_others(request):
        raise none_taken(sources)


def refuse_images_of_sample(sample: SampleInput) -> None:
    """As `refuse_images`, for the sample of a session."""
    if sources := list(_sources_of(sample, ("sample",))):
        raise none_taken(sources)


def _sources_of(sample: SampleInput, field: Location) -> Iterator[Source]:
    for number, message in enumerate(sample.messages or ()):
        if not isinstance(message.content, list):
            continue
        for place, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                yield part.image, (*field, "messages", number, "content", place, "image")
    for number, given in enumerate(sample.message_log or ()):
        for place, shows in enumerate(given.mm_ranges or ()):
            yield shows.media, (*field, "message_log", number, "mm_ranges", place, "media")


async def bytes_of_files(request: RolloutRequest) -> int:
    """Characters of the request's data URLs, which no result repeats."""
    return sum(len(source) for source, _ in await _read_beside_others(request) if source.startswith("data:"))


async def _read_beside_others(request: RolloutRequest) -> list[Source]:
    """All images of the request, in order: of prompts as they were given, of message logs by their names.

    Those of a large request are read in a thread.
    """

    def sources() -> list[Source]:
        found = (_sources_of(sample, ("samples", place)) for place, sample in enumerate(request.samples))
        return [*chain.from_iterable(found)]

    is_small = len(request.samples) <= MOST_SAMPLES_READ_INLINE
    return sources() if is_small else await asyncio.to_thread(sources)


def _refuse_too_many(sources: Sequence[Source], most: int) -> None:
    """Raises `RequestProblem` (422) for samples that show more images than a sample may."""
    counts = Counter(place[: 2 if place[0] == "samples" else 1] for _, place in sources)
    problems = [
        FieldProblem(
            field=dotted(sample),
            message=f"it shows {count} images, and images.max_images allows {most}; show fewer",
            value=count,
        )
        for sample, count in counts.items()
        if count > most
    ]
    if problems:
        raise invalid_request(*problems[:MOST_PROBLEMS])


def _refused(sources: Sequence[Source], messages: Mapping[str, str]) -> RequestProblem:
    problems = [
        FieldProblem(field=dotted(place), message=messages[source], value=shown(source))
        for source, place in sources[:MOST_PROBLEMS]
    ]
    return invalid_request(*problems)


def none_taken(sources: Sequence[Source], message: str = NOT_TAKEN) -> RequestProblem:
    """The refusal of all images, for one reason."""
    return _refused(sources, dict.fromkeys((source for source, _ in sources), message))


def _decoded(url: str, settings: ImagesSettings) -> bytes:
    """The content of a data URL.

    Raises:
        ImageRefused: it is too large, of another type, or not base64.
    """
    if (head := DATA_URL.match(url)) is None:
        given = url[:LONGEST_DATA_URL_HEAD].partition(",")[0]
        raise ImageRefused(
            f"{given!r} does not begin a data URL of an image; send data:image/png;base64,... (or jpeg, webp)"
        )
    # Before it is decoded; base64 has four characters for three bytes.
    refuse_bytes((len(url) - head.end()) // 4 * 3 - 2, settings)
    try:
        return binascii.a2b_base64(url[head.end() :].encode("ascii"), strict_mode=True)
    except ValueError as error:
        raise ImageRefused(f"its data URL is not base64 ({error}); encode the file again") from error


def _with_names(request: RolloutRequest, sources: Sequence[Source], names: Mapping[str, str]) -> RolloutRequest:
    """A copy of the request whose prompts have these names in place of what they were made of."""
    positions = {place[1] for source, place in sources if source in names}
    samples = [
        _sample_with_names(sample, names) if position in positions else sample
        for position, sample in enumerate(request.samples)
    ]
    return request.model_copy(update={"samples": samples})


def _sample_with_names(sample: SampleInput, names: Mapping[str, str]) -> SampleInput:
    def named(part: ContentPart) -> ContentPart:
        return (
            part.model_copy(update={"image": names.get(part.image, part.image)})
            if isinstance(part, ImagePart)
            else part
        )

    messages = [
        message.model_copy(update={"content": [*map(named, message.content)]})
        if isinstance(message.content, list)
        else message
        for message in sample.messages or ()
    ]
    return sample.model_copy(update={"messages": messages})

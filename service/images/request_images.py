"""The images of a request: each data URL becomes the name of an image that the store keeps.

Guarantee: all images of a request are checked before the first of them is kept; one that is refused keeps none.
"""

import asyncio
import binascii
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from deployments.images.book import ImageRefused, ImagesSettings, ImageUnknown
from deployments.images.checks import CheckedImages, media_type_of, refuse_bytes
from deployments.protocols.images import ImageStore
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.info import BlobInfo
from rollout_client.contract.messages import ContentPart, ImagePart
from rollout_client.contract.rollouts import RolloutRequest, SampleInput
from service.access.keys import ANYBODY, Caller
from service.problems import MOST_PROBLEMS, RequestProblem, dotted, invalid_request, shown

DATA_URL = re.compile(r"data:image/(?:png|jpeg);base64,")
LONGEST_DATA_URL_HEAD = 40
NAME_PREFIX = "sha256:"
Location = tuple[str | int, ...]
Source = tuple[str, Location]
"""An image as the request has it, and its place there."""
NOT_TAKEN = (
    "the service takes no images; leave it out, or serve a model that takes them, with `images: {}` in the config"
)


class RequestImages:
    """Images that come into one ingress replica, in requests or by themselves.

    Args:
        takes_images: whether the model does; requests may show none to another one.
    """

    def __init__(self, store: ImageStore, settings: ImagesSettings, takes_images: bool = True) -> None:
        self.store = store
        self.settings = settings
        self.takes_images = takes_images
        self._checked = CheckedImages(store, settings)
        # Decoding base64 holds the interpreter's lock for milliseconds: the event loop waits for one thread, not all.
        self._decoding = asyncio.Lock()

    async def upload(self, data: bytes, caller: Caller = ANYBODY) -> BlobInfo:
        """Checks and keeps one image.

        Raises:
            RequestProblem: 422, it is not an image that the service takes.
            ImagesFull, ImagesLost: it could not be kept.
        """
        try:
            info = await self._checked.check(data)
        except ImageRefused as refused:
            raise invalid_request(FieldProblem(field="body", message=str(refused))) from refused
        [name] = await self.store.put([data], caller.name)
        return BlobInfo(name=name, bytes=len(data), **info._asdict())

    async def download(self, name: str, caller: Caller = ANYBODY) -> tuple[bytes, str]:
        """The content of an image, and its media type; raises `ImageUnknown`, also for one of another key."""
        if await self.store.refused([name], caller.name):
            raise ImageUnknown.named(name)
        data = await self.store.get(name)
        return data, str(media_type_of(data))

    async def keep(self, sources: Sequence[Source], caller: Caller) -> dict[str, str]:
        """As `names_of`, for a service that takes images."""
        # Hashing takes a millisecond for a megabyte, once for each text.
        each = await asyncio.to_thread(lambda: dict.fromkeys(source for source, _ in sources))
        contents, refusals = dict[str, bytes | str](), dict[str, str]()
        for source in each:
            try:
                contents[source] = source if source.startswith(NAME_PREFIX) else await self._decode(source)
            except ImageRefused as refused:
                refusals[source] = str(refused)
        if not refusals:
            names, refused_images = await self._checked.keep(contents.values(), caller.name)
            refusals = {
                source: refused_images[content] for source, content in contents.items() if content in refused_images
            }
        if refusals:
            raise _refused([(source, place) for source, place in sources if source in refusals], refusals)
        return {source: names[content] for source, content in contents.items() if source != content}

    async def _decode(self, url: str) -> bytes:
        """Raises `ImageRefused`."""
        async with self._decoding:
            return await asyncio.to_thread(_decoded, url, self.settings)


async def names_of(
    images: RequestImages | None, sources: Sequence[Source], caller: Caller = ANYBODY, is_bounded: bool = True
) -> dict[str, str]:
    """Keeps what is not named yet, and returns the names of that, by data URL.

    Args:
        images: `None` for a service that takes none.
        is_bounded: whether a sample may show `max_images` at most.

    Raises:
        RequestProblem: 422 with the first `MOST_PROBLEMS` images that cannot be taken. Nothing was kept.
        ImagesFull, ImagesLost: they could not be kept.
    """
    if not sources:
        return {}
    if images is None or not images.takes_images:
        raise _refused(sources, dict.fromkeys((source for source, _ in sources), NOT_TAKEN))
    counts = Counter(place[: 2 if place[0] == "samples" else 1] for _, place in sources)
    [(sample, count)] = counts.most_common(1)
    most = images.settings.max_images
    if is_bounded and count > most:
        message = f"it shows {count} images, and images.max_images allows {most}; show fewer"
        raise invalid_request(FieldProblem(field=dotted(sample), message=message, value=count))
    return await images.keep(sources, caller)


async def with_names(images: RequestImages | None, request: RolloutRequest, caller: Caller = ANYBODY) -> RolloutRequest:
    """The request with each image by its name: the very request if it has only such, else a copy.

    Raises what `names_of` raises.
    """
    names = await names_of(images, await _sources_beside_others(request), caller)
    if not names:
        return request
    return request.model_copy(update={"samples": [_with_names(sample, names) for sample in request.samples]})


async def sample_with_names(images: RequestImages | None, sample: SampleInput, caller: Caller = ANYBODY) -> SampleInput:
    """As `with_names`, for the sample of a session."""
    return _with_names(sample, await names_of(images, [*_sources_of(sample, ("sample",))], caller))


async def bytes_of_files(request: RolloutRequest) -> int:
    """Characters of the request's data URLs, which no result repeats."""
    return sum(len(source) for source, _ in await _sources_beside_others(request) if source.startswith("data:"))


async def _sources_beside_others(request: RolloutRequest) -> list[Source]:
    """All images of the request, in order: of prompts as they were given, of message logs by their names."""

    def sources() -> list[Source]:
        samples = enumerate(request.samples)
        return [source for place, sample in samples for source in _sources_of(sample, ("samples", place))]

    return await asyncio.to_thread(sources)


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


def _refused(sources: Sequence[Source], messages: Mapping[str, str]) -> RequestProblem:
    problems = [
        FieldProblem(field=dotted(place), message=messages[source], value=shown(source))
        for source, place in sources[:MOST_PROBLEMS]
    ]
    return invalid_request(*problems)


def _decoded(url: str, settings: ImagesSettings) -> bytes:
    """The content of a data URL.

    Raises:
        ImageRefused: it is too large, of another type, or not base64.
    """
    if (head := DATA_URL.match(url)) is None:
        given = url[:LONGEST_DATA_URL_HEAD].partition(",")[0]
        raise ImageRefused(f"{given!r} does not begin a data URL of an image; send data:image/png;base64,... (or jpeg)")
    # Before it is decoded; base64 has four characters for three bytes.
    refuse_bytes((len(url) - head.end()) // 4 * 3 - 2, settings)
    try:
        return binascii.a2b_base64(url[head.end() :].encode("ascii"), strict_mode=True)
    except ValueError as error:
        raise ImageRefused(f"its data URL is not base64 ({error}); encode the file again") from error


def _with_names(sample: SampleInput, names: Mapping[str, str]) -> SampleInput:
    """A copy of the sample with these names in place of what they were made of; itself if it shows none of that."""
    if not any(source in names for source, _ in _sources_of(sample, ())):
        return sample

    def named(part: ContentPart) -> ContentPart:
        if not isinstance(part, ImagePart):
            return part
        return part.model_copy(update={"image": names.get(part.image, part.image)})

    messages = [
        message.model_copy(update={"content": [*map(named, message.content)]})
        if isinstance(message.content, list)
        else message
        for message in sample.messages or ()
    ]
    return sample.model_copy(update={"messages": messages})

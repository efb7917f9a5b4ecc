"""Checks of images before they are kept: their format, their size and their pixels.

The header is read first: an image that says it has too many pixels costs nothing, whatever a decoder would allocate for
it. Only then it is decoded, in a thread, which can take a second.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import BytesIO
from itertools import chain
from typing import NamedTuple

from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import MARKER, JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from deployments.failures import EnvironmentBroken, ImagesLost, Overloaded
from deployments.images.book import NOT_KEPT, ImageRefused, ImagesFull, ImagesSettings
from deployments.protocols.images import ImageStore, name_of_image
from deployments.storage.storage import StorageFailed
from rollout_env import ChatMessage, StepOutcome

MOST_JPEG_STEPS = 4096
"""Segments before the first scan, and bytes between them. Pillow takes microseconds for each, and joins those of Exif
one by one. A profile or a description of `max_image_bytes` has some hundred segments."""
MOST_JPEG_SCANS = 100
"""A scan of 30 bytes is a pass over all blocks of the picture. Encoders write about ten."""
CHECKS_AT_ONCE = 4
"""Images that a process decodes at the same time: each takes the memory of its pixels."""
# Not `Image.open`: that tries every format that Pillow knows, and warns of large images.
READERS: dict[str, type[ImageFile]] = {"image/png": PngImageFile, "image/jpeg": JpegImageFile}


class _ImageInfo(NamedTuple):
    """Format and size of a checked image, in pixels."""

    media_type: str
    width: int
    height: int


def media_type_of(data: bytes) -> str | None:
    """The format by the first bytes; `None` if it is not one that the service takes."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    return "image/jpeg" if data.startswith(b"\xff\xd8\xff") else None


def _checked_image(data: bytes, settings: ImagesSettings) -> _ImageInfo:
    """The format and size of an image that the service takes.

    Raises:
        ImageRefused: it is too large, not an image of a known format, animated, or cannot be decoded.
    """
    refuse_bytes(len(data), settings)
    if (media_type := media_type_of(data)) is None:
        raise ImageRefused(f"it is not PNG or JPEG, it begins with {data[:8].hex(' ') or 'nothing'}; convert it")
    if media_type == "image/jpeg":
        _refuse_long_jpeg(data)
    try:
        # Reads the header alone, and allocates nothing for the pixels.
        image = READERS[media_type](BytesIO(data))
        width, height = image.size
        is_animated, is_large = getattr(image, "n_frames", 1) > 1, width * height > settings.max_pixels
        if not (is_animated or is_large):
            # JPEG is decoded at an eighth of its size, from all of its bytes.
            image.draft(image.mode, (1, 1))
            image.load()
    except Exception as error:
        # The decoders raise almost anything for damaged bytes.
        raise ImageRefused(f"it cannot be decoded ({type(error).__name__}); send the whole file, undamaged") from error
    if is_large:
        raise ImageRefused(
            f"it has {width} x {height} pixels, and images.max_pixels allows {settings.max_pixels}; scale it down"
        )
    if is_animated:
        raise ImageRefused("it is animated; send one picture")
    return _ImageInfo(media_type, width, height)


def refuse_bytes(size_bytes: int, settings: ImagesSettings) -> None:
    """Raises `ImageRefused` for an image that is too large."""
    if size_bytes > settings.max_image_bytes:
        raise ImageRefused(
            f"it has {size_bytes} bytes, and images.max_image_bytes allows {settings.max_image_bytes}; "
            "compress it or scale it down"
        )


def _refuse_long_jpeg(data: bytes) -> None:
    """Raises `ImageRefused` for a file with more segments or scans than encoders write.

    Steps through the header as Pillow does, up to the first scan or the marker that Pillow refuses.
    """
    place = steps = 2
    while True:
        found = data.find(b"\xff", place)
        marker = int.from_bytes(data[found : found + 2], "big")
        if found < 0 or marker == 0xFFDA or not (marker in MARKER or marker in (0xFF00, 0xFFFF)):
            break
        steps += found - place + 1
        if steps > MOST_JPEG_STEPS:
            raise ImageRefused(f"its header has more than {MOST_JPEG_STEPS} segments; encode it again")
        has_length = marker in MARKER and MARKER[marker][2] is not None
        length = int.from_bytes(data[found + 2 : found + 4], "big") if has_length else 0
        place = found + (1 if marker == 0xFFFF else 2 + length)
    if (scans := data.count(b"\xff\xda", max(found, 0))) > MOST_JPEG_SCANS:
        raise ImageRefused(f"it has {scans} scans, and may have {MOST_JPEG_SCANS}; encode it again")


class CheckedImages:
    """The images that one process puts into the store: checked, and named by their content."""

    def __init__(self, store: ImageStore, settings: ImagesSettings) -> None:
        self.store = store
        self.settings = settings
        self._slots = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def check(self, data: bytes) -> _ImageInfo:
        """`_checked_image` in a thread; raises `ImageRefused` as it does."""
        async with self._slots:
            return await asyncio.to_thread(_checked_image, data, self.settings)

    async def keep(
        self, images: Iterable[bytes | str], owner: str | None
    ) -> tuple[dict[bytes | str, str], dict[bytes | str, str]]:
        """Keeps images for an owner, given as files or by name. What it has already is neither checked nor put again.

        Returns:
            The name of each image; and why some cannot be taken, in which case none was kept.

        Raises:
            ImagesFull, ImagesLost, StorageFailed: they could not be kept.
        """
        each = list(dict.fromkeys(images))
        names = dict(zip(each, await asyncio.to_thread(lambda: [*map(_name_of, each)]), strict=True))
        unknown = set(await self.store.refused([*dict.fromkeys(names.values())], owner) if each else ())
        new = [image for image, name in names.items() if name in unknown and isinstance(image, bytes)]
        refusals: dict[bytes | str, str] = {image: NOT_KEPT for image in each if image in unknown}
        checked = await asyncio.gather(*map(self.check, new), return_exceptions=True)
        for image, result in zip(new, checked, strict=True):
            if isinstance(result, ImageRefused):
                refusals[image] = str(result)
            elif isinstance(result, BaseException):
                raise result
        if new and not refusals:
            await self.store.put(new, owner)
        return names, refusals


def _name_of(image: bytes | str) -> str:
    return image if isinstance(image, str) else name_of_image(image)


LONGEST_SHOWN = 80
"""Characters of a name that is wrong."""
NOT_TAKEN = (
    "The environment's observation shows an image, and the service takes none: serve a model that does, with "
    "`images: {}` in the config."
)


class ObservedImages:
    """Keeps the images of observations. One for each replica of an environment."""

    def __init__(self, store: ImageStore, settings: ImagesSettings) -> None:
        self._images = CheckedImages(store, settings)

    async def kept(self, outcome: StepOutcome, owner: str | None) -> StepOutcome:
        """The outcome with the names of its images, all of which are kept for `owner`, the key of the rollout.

        Raises:
            EnvironmentBroken: one of them is not an image that the service takes, or a name that this owner may not
                use.
            Overloaded: there is no room for them.
            ImagesLost: the store cannot be reached.
        """
        messages = outcome.observations
        shown = list(chain.from_iterable(message.get("images", ()) for message in messages))
        if (most := self._images.settings.max_images) < len(shown):
            raise _broken(f"it shows {len(shown)} images, and images.max_images allows {most}")
        try:
            names, refusals = await self._images.keep(shown, owner)
        except ImagesFull as full:
            raise Overloaded(f"The images of an observation have no room: {full.problems[0].message}.") from full
        except StorageFailed as failed:
            raise ImagesLost(str(failed)) from failed
        for image, refusal in refusals.items():
            what = f"an image of {len(image)} bytes" if isinstance(image, bytes) else repr(image[:LONGEST_SHOWN])
            raise _broken(f"{what}: {refusal}")
        named = [_with_names(message, names) for message in messages]
        return replace(outcome, observation=named if isinstance(outcome.observation, list) else named[0])


def shows_images(outcome: StepOutcome) -> bool:
    return any(message.get("images") for message in outcome.observations)


def _with_names(message: ChatMessage, name_of: Mapping[bytes | str, str]) -> ChatMessage:
    if "images" not in message:
        return message
    names: list[bytes | str] = [name_of[image] for image in message["images"]]
    return {**message, "images": names}


def _broken(problem: str) -> EnvironmentBroken:
    return EnvironmentBroken(f"The environment's observation cannot be shown: {problem}.")

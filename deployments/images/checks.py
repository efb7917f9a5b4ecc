"""Checks of an image before it is kept: its format, its size and its pixels.

The header is read first, by the format's own fields: an image that says it has too many pixels costs nothing, whatever
a decoder would allocate for it. Only then it is decoded, which can take a second: `ImageChecks` does so in threads.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Literal, NamedTuple

from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import MARKER, JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from deployments.images.failures import ImageRefused
from deployments.images.settings import ImagesSettings

MediaType = Literal["image/png", "image/jpeg", "image/webp"]
PNG_HEADER_BYTES = 24
WEBP_HEADER_BYTES = 30
WEBP_CHUNK = slice(12, 16)
MOST_JPEG_STEPS = 4096
"""Segments before the first scan, and bytes between them. Pillow takes microseconds for each, and joins those of Exif
one by one. A profile or a description of `max_image_bytes` has some hundred segments."""
MOST_JPEG_SCANS = 100
"""A scan of 30 bytes is a pass over all blocks of the picture. Encoders write about ten."""


class Size(NamedTuple):
    """Width and height of an image, in pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Format and size of a checked image."""

    media_type: MediaType
    size: Size


def _png_size(data: bytes) -> Size:
    if len(data) < PNG_HEADER_BYTES or data[12:16] != b"IHDR":
        raise ImageRefused("its PNG header is not whole; send the whole file")
    return Size(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))


def _webp_size(data: bytes) -> Size:
    if len(data) < WEBP_HEADER_BYTES:
        raise ImageRefused("its WebP header is not whole; send the whole file")
    match data[WEBP_CHUNK]:
        case b"VP8X":
            return Size(1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little"))
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return Size(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        case b"VP8 ":
            width, height = int.from_bytes(data[26:28], "little"), int.from_bytes(data[28:30], "little")
            return Size(width & 0x3FFF, height & 0x3FFF)
    raise ImageRefused("its WebP header has an unknown chunk; send another file")


def _jpeg_size(data: bytes) -> Size:
    first_scan = _jpeg_header_end(data)
    if (scans := data.count(b"\xff\xda", first_scan)) > MOST_JPEG_SCANS:
        raise ImageRefused(f"it has {scans} scans, and may have {MOST_JPEG_SCANS}; encode it again")
    # Reads the markers alone, and allocates nothing for the pixels.
    return Size(*_opened(JpegImageFile, data).size)


def _jpeg_header_end(data: bytes) -> int:
    """The place of the first scan, or of the marker that Pillow refuses. It steps through the header as Pillow does.

    Raises:
        ImageRefused: these are more than `MOST_JPEG_STEPS` steps.
    """
    place = steps = 2
    while steps <= MOST_JPEG_STEPS:
        found = data.find(b"\xff", place)
        marker = int.from_bytes(data[found : found + 2], "big")
        is_known = found >= 0 and (marker in MARKER or marker in (0xFF00, 0xFFFF))
        if not is_known or marker == 0xFFDA:
            return max(found, 0)
        steps += found - place + 1
        has_length = marker in MARKER and MARKER[marker][2] is not None
        length = int.from_bytes(data[found + 2 : found + 4], "big") if has_length else 0
        place = found + (1 if marker == 0xFFFF else 2 + length)
    raise ImageRefused(f"its header has more than {MOST_JPEG_STEPS} segments; encode it again")


@dataclass(frozen=True, slots=True)
class _Format:
    """One format of images."""

    media_type: MediaType
    is_format_of: Callable[[bytes], bool]
    size_of: Callable[[bytes], Size]
    # Not `Image.open`: that tries every format that Pillow knows, and warns of large images.
    reader: type[ImageFile]


FORMATS = (
    _Format("image/png", lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), _png_size, PngImageFile),
    _Format("image/jpeg", lambda data: data.startswith(b"\xff\xd8\xff"), _jpeg_size, JpegImageFile),
    _Format("image/webp", lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _webp_size, WebPImageFile),
)


def checked_image(data: bytes, settings: ImagesSettings) -> ImageInfo:
    """The format and size of an image that the service takes.

    Raises:
        ImageRefused: it is too large, not an image of a known format, animated, or cannot be decoded.
    """
    refuse_bytes(len(data), settings)
    if (found := format_of(data)) is None:
        raise ImageRefused(f"it is not PNG, JPEG or WebP, it begins with {data[:8].hex(' ') or 'nothing'}; convert it")
    size = found.size_of(data)
    if not (size.width and size.height):
        raise ImageRefused(f"it has {size.width} x {size.height} pixels; send at least one")
    if size.width * size.height > settings.max_pixels:
        raise ImageRefused(
            f"it has {size.width} x {size.height} pixels, and images.max_pixels allows {settings.max_pixels}; "
            "scale it down"
        )
    _refuse_undecodable(found.reader, data, size)
    return ImageInfo(found.media_type, size)


def refuse_bytes(size_bytes: int, settings: ImagesSettings) -> None:
    """Raises `ImageRefused` for an image that is too large."""
    if size_bytes > settings.max_image_bytes:
        raise ImageRefused(
            f"it has {size_bytes} bytes, and images.max_image_bytes allows {settings.max_image_bytes}; "
            "compress it or scale it down"
        )


def format_of(data: bytes) -> _Format | None:
    """The format by the first bytes; `None` if it is not one that the service takes."""
    return next((each for each in FORMATS if each.is_format_of(data)), None)


def _refuse_undecodable(reader: type[ImageFile], data: bytes, size: Size) -> None:
    """Decodes the image. Raises `ImageRefused` if it breaks off, is damaged, animated or not what its header says."""
    image = _opened(reader, data)
    if image.size != size:
        raise ImageRefused("its header contradicts itself; send another file")
    if getattr(image, "n_frames", 1) > 1:
        raise ImageRefused("it is animated; send one picture")
    # JPEG is decoded at an eighth of its size, from all of its bytes.
    image.draft(image.mode, (1, 1))
    try:
        image.load()
    except Exception as error:
        # The decoders raise almost anything for damaged bytes.
        raise _undecodable(error) from error


def _opened(reader: type[ImageFile], data: bytes) -> ImageFile:
    """The image with its header read. Raises `ImageRefused` if that is damaged."""
    try:
        return reader(BytesIO(data))
    except Exception as error:
        raise _undecodable(error) from error


def _undecodable(error: Exception) -> ImageRefused:
    return ImageRefused(f"it cannot be decoded ({type(error).__name__}); send the whole file, undamaged")


CHECKS_AT_ONCE = 4
"""Images that a process decodes at the same time: each takes the memory of its pixels."""


class ImageChecks:
    """The checks of one process, in threads."""

    def __init__(self, settings: ImagesSettings) -> None:
        self.settings = settings
        self._slots = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def checked(self, data: bytes) -> ImageInfo:
        """`checked_image` in a thread; raises `ImageRefused` as it does."""
        async with self._slots:
            return await asyncio.to_thread(checked_image, data, self.settings)

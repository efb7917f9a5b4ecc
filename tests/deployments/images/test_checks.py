"""Which bytes are an image that the service takes, and what refuses the others."""

import tracemalloc
import warnings
import zlib
from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from deployments.images.book import ImageRefused, ImagesSettings
from deployments.images.checks import _checked_image, _ImageInfo
from tests.deployments.images.pictures import animation, picture

SETTINGS = ImagesSettings()
SMALL = ImagesSettings(max_pixels=12, max_image_bytes=2000)
FORMS = {"PNG": "image/png", "JPEG": "image/jpeg"}


def refusal_of(data: bytes, settings: ImagesSettings = SETTINGS) -> str:
    with pytest.raises(ImageRefused) as refused:
        _checked_image(data, settings)
    return str(refused.value)


def png_that_says(*sizes: tuple[int, int]) -> bytes:
    """A PNG file with a header for each size, and next to no data."""
    chunks = b"\x89PNG\r\n\x1a\n"
    ends = bytes([8, 2, 0, 0, 0])
    headers = [(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + ends) for width, height in sizes]
    for kind, data in (*headers, (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        chunks += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return chunks


def jpeg_that_says(width: int, height: int) -> bytes:
    data = bytearray(picture(form="JPEG"))
    begin = data.index(b"\xff\xc0")
    data[begin + 5 : begin + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


MODES = [("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")] + [
    ("JPEG", mode) for mode in ("L", "RGB", "CMYK")
]


@given(st.sampled_from(MODES), st.integers(1, 60), st.integers(1, 60))
def test_an_image_has_the_format_and_the_size_of_its_content(mode: tuple[str, str], width: int, height: int) -> None:
    file, (form, pixels) = BytesIO(), mode
    Image.new(pixels, (width, height)).save(file, form)
    assert _checked_image(file.getvalue(), SETTINGS) == _ImageInfo(FORMS[form], width, height)


def test_bounds_are_kept_to_the_last_pixel_and_byte() -> None:
    assert _checked_image(picture(), SMALL)[1:] == (4, 3)
    for form in FORMS:
        assert refusal_of(picture(form=form, size=(13, 1)), SMALL) == (
            "it has 13 x 1 pixels, and images.max_pixels allows 12; scale it down"
        )
    data = picture()
    exactly = SMALL.model_copy(update={"max_image_bytes": len(data)})
    assert _checked_image(data, exactly)[1:] == (4, 3)
    assert refusal_of(data, exactly.model_copy(update={"max_image_bytes": len(data) - 1})) == (
        f"it has {len(data)} bytes, and images.max_image_bytes allows {len(data) - 1}; compress it or scale it down"
    )


@pytest.mark.parametrize(
    ("bomb", "side"),
    [(png_that_says((2**31 - 1, 2**31 - 1)), 2**31 - 1), (jpeg_that_says(65_535, 65_535), 65_535)],
    ids=["png", "jpeg"],
)
def test_a_bomb_of_pixels_costs_nothing(bomb: bytes, side: int) -> None:
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        says = refusal_of(bomb)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert says == f"it has {side} x {side} pixels, and images.max_pixels allows 16000000; scale it down"
    assert peak_bytes < 2**20


def jpeg_with_scans(count: int) -> bytes:
    """A progressive JPEG file that refines the same pixels `count` times."""
    file = BytesIO()
    Image.new("L", (64, 64), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    before = data.count(b"\xff\xda")
    return data[:end] + data[last:end] * (count - before) + data[end:]


def jpeg_with_segments(segment: bytes, count: int) -> bytes:
    """A JPEG file with these behind its first segment."""
    data = picture(form="JPEG")
    behind = 4 + int.from_bytes(data[4:6], "big")
    return data[:behind] + segment * count + data[behind:]


def test_a_bomb_of_scans_is_refused() -> None:
    assert _checked_image(jpeg_with_scans(100), SETTINGS)[1:] == (64, 64)
    assert refusal_of(jpeg_with_scans(101)) == "it has 101 scans, and may have 100; encode it again"


@pytest.mark.parametrize(
    "segment",
    [
        b"\xff\xe1\x00\x0eExif\x00\x00\x2a\x2a\x2a\x2a\x2a\x2a",
        b"\xff\xe5\x00\x02",
        b"\xff\xff",
        b"\xff\x00",
        b"\x00\x00",
        # Pillow reads no length after this marker, and goes on within it.
        b"\xff\xf0\x00\x06\xff\xe5\x00\x02",
    ],
    ids=["exif", "application", "padding", "stuffing", "junk", "extension"],
)
def test_a_bomb_of_segments_is_refused_and_a_long_profile_is_not(segment: bytes) -> None:
    assert refusal_of(jpeg_with_segments(segment, 5000)).startswith("its header has more than 4096 segments;")
    profile = b"\xff\xe2\xff\xffICC_PROFILE\x00\x01\x01" + bytes(65_519)
    assert _checked_image(jpeg_with_segments(profile, 300), SETTINGS)[1:] == (4, 3)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_breaks_off_is_refused(form: str) -> None:
    data = picture(form=form, size=(64, 64))
    assert refusal_of(data[: len(data) // 2]).endswith("send the whole file, undamaged")
    assert "send" in refusal_of(data[:12])


def png_with_text(count: int) -> bytes:
    text, file = PngImagePlugin.PngInfo(), BytesIO()
    text.add_text("comment", "x" * count, zip=True)
    Image.new("RGB", (4, 3)).save(file, "PNG", pnginfo=text)
    return file.getvalue()


UNDECODABLE = "it cannot be decoded ({}); send the whole file, undamaged"
NO_IMAGE = "it is not PNG or JPEG, it begins with {}; convert it"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", NO_IMAGE.format("nothing")),
        (b"RIFF\x1a\x00\x00\x00WEBP", NO_IMAGE.format("52 49 46 46 1a 00 00 00")),
        (b"GIF89a\x01\x00\x01\x00", NO_IMAGE.format("47 49 46 38 39 61 01 00")),
        (b"<svg/>", NO_IMAGE.format("3c 73 76 67 2f 3e")),
        (animation("PNG"), "it is animated; send one picture"),
        (png_with_text(2**24), UNDECODABLE.format("ValueError")),
        (png_that_says((0, 5)), UNDECODABLE.format("SyntaxError")),
        (
            png_that_says((4, 3), (9000, 9000)),
            "it has 9000 x 9000 pixels, and images.max_pixels allows 16000000; scale it down",
        ),
    ],
    ids=["nothing", "webp", "gif", "svg", "animated", "text", "no width", "two headers"],
)
def test_what_is_no_image_to_be_shown_is_refused_with_what_to_do(data: bytes, says: str) -> None:
    assert refusal_of(data) == says


@given(st.sampled_from(sorted(FORMS)), st.data())
def test_damaged_files_are_refused_or_have_a_size_within_the_bounds(form: str, data: st.DataObject) -> None:
    content = bytearray(picture(form=form, size=(9, 9)))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    width, height = 1, 1
    with suppress(ImageRefused):
        _, width, height = _checked_image(bytes(content), SETTINGS)
    assert 1 <= width * height <= SETTINGS.max_pixels

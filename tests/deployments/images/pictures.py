"""Images for tests, drawn here."""

from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image


@cache
def picture(color: str = "red", form: str = "PNG", size: tuple[int, int] = (4, 3), mode: str = "RGB") -> bytes:
    """A file with one color."""
    file = BytesIO()
    Image.new(mode, size, color).save(file, form)
    return file.getvalue()


def animation(form: str, **options: Any) -> bytes:
    """A file of two pictures."""
    file = BytesIO()
    first, second = (Image.new("RGB", (4, 3), color) for color in ("red", "blue"))
    first.save(file, form, save_all=True, append_images=[second], **options)
    return file.getvalue()

"""Settings of the image store: where images are kept, how many and for how long, and which are taken."""

from pydantic import Field

from deployments.storage.storage import StorageSettings

MIB = 2**20
GIB = 2**30


class ImagesSettings(StorageSettings):
    keep_s: float = Field(default=900, ge=0)
    """An image is kept for at least so many seconds after its last use: whenever a request names it, or a model or a
    client reads it. Where there is no room for another image, those go that were not used for the longest time."""
    max_bytes: int = Field(default=2 * GIB, ge=1)
    """Bound of all images together, in Ray's memory and in the database. At this bound new images are refused with
    429, unless others can go."""
    max_image_bytes: int = Field(default=20 * MIB, ge=1)
    """A larger image is refused."""
    max_pixels: int = Field(default=16_000_000, ge=1)
    """An image with more pixels (width times height) is refused, by its header, before anything of it is decoded."""
    max_images: int = Field(default=64, ge=1)
    """Images that one sample of a request may show, those of its message log included; and one observation."""

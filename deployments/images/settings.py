"""Settings of the image store: where images are kept, how many and for how long, and which are taken."""

from pydantic import Field

from deployments.storage.storage import StorageSettings

MIB = 2**20
GIB = 2**30


class ImagesSettings(StorageSettings):
    keep_s: float = Field(default=86_400, ge=600)
    """An image that nobody has used for so many seconds is forgotten. Engines say every 300 s what they show."""
    keep_at_least_s: float = Field(default=900, ge=0)
    """Where there is no room for another image, those go first that were not used for the longest time, and none that
    was used within so many seconds. A rollout uses its images whenever a model or a client reads them."""
    max_bytes: int = Field(default=2 * GIB, ge=1)
    """Bound of all images together, in Ray's memory and in the database. At this bound new images are refused with
    429, unless others can go."""
    max_share: float = Field(default=0.5, gt=0, le=1)
    """Share of `max_bytes` that the images of one key may take. Where nobody needs a key, all callers are one, which
    may take all."""
    max_image_bytes: int = Field(default=20 * MIB, ge=1)
    """A larger image is refused."""
    max_pixels: int = Field(default=16_000_000, ge=1)
    """An image with more pixels (width times height) is refused, by its header, before anything of it is decoded."""
    max_images: int = Field(default=64, ge=1)
    """Images that one sample of a request may show, those of its message log included; and one observation."""

"""The images that are kept: whose they are, when they were last used, and the room that they take. No I/O, no clock.

Their settings, and every way in which one can be refused: the ingress answers with problem documents.

Times are seconds since 1970. Uses are not stored: for a store that starts, an image was used last when it was put.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import orjson
from pydantic import Field

from deployments.failures import StoreFailure
from deployments.storage.storage import EntryName, StorageSettings, StoredChange, StoredRecord
from deployments.storage.stored_state import Planned

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


class ImageFailure(StoreFailure):
    """A call of the image store was not carried out."""


class ImageUnknown(ImageFailure):
    """The image never was, is another key's, or is not kept any more."""

    status = 404
    name = "image-unknown"
    title = "The image is not known"

    @classmethod
    def named(cls, name: str) -> Self:
        return cls.of("name", NOT_KEPT, name)


class ImagesFull(ImageFailure):
    """The images that are kept leave no room for another one."""

    status = 429
    name = "images-full"
    title = "The kept images leave no room for another one; nothing was started"
    # Images can go once nobody has used them for images.keep_s.
    retry_after_s = 30


class ImagesNotConfigured(ImageFailure):
    """The config has no `images`."""

    status = 501
    name = "images-not-configured"
    title = "The service takes no images"


NOT_KEPT = "there is no such image: it is not kept any more, or it is another key's; send its file"


class ImageRefused(Exception):
    """The bytes are not an image that the service takes. The message says what to send, without a full stop."""


CONTENT = EntryName("content", 0)


@dataclass(frozen=True, slots=True)
class _KeptImage:
    """An image of the book, without its content."""

    size_bytes: int
    owners: frozenset[str]
    used_at: float

    def record(self) -> bytes:
        return orjson.dumps({"owners": sorted(self.owners), "used_at": self.used_at})


class ImageBook:
    """The images of one store, the one that was not used for the longest time first.

    Args:
        kept: what the database has.
        time_s: when the store starts.
    """

    def __init__(self, settings: ImagesSettings, kept: Sequence[StoredRecord], time_s: float) -> None:
        self._settings = settings
        self._images: dict[str, _KeptImage] = {}
        self.total_bytes = 0
        found = ((stored, orjson.loads(stored.record)) for stored in kept)
        for stored, fields in sorted(found, key=lambda pair: pair[1]["used_at"]):
            size, owners = sum(stored.sizes.values()), frozenset(fields["owners"])
            self._apply({stored.record_id: _KeptImage(size, owners, min(fields["used_at"], time_s))})

    def __len__(self) -> int:
        return len(self._images)

    def __contains__(self, name: str) -> bool:
        return name in self._images

    def refused(self, names: Iterable[str], owner: str) -> list[str]:
        """Those that are not kept, or not for this owner, each once."""
        images = ((name, self._images.get(name)) for name in dict.fromkeys(names))
        return [name for name, image in images if image is None or owner not in image.owners]

    def use(self, names: Iterable[str], time_s: float) -> None:
        """Keeps images for the whole time from now on. Unknown names are ignored."""
        for name in names:
            if (image := self._images.pop(name, None)) is not None:
                self._images[name] = replace(image, used_at=time_s)

    def put(self, images: Mapping[str, bytes], owner: str, time_s: float) -> Planned[list[str]]:
        """Keeps images, by their names, for an owner too. Returns the names of those that made room.

        Raises:
            ImagesFull: there is no room, even without the images that may go.
        """
        settings, changed = self._settings, dict[str, _KeptImage | None]()
        over = self.total_bytes - settings.max_bytes
        over += sum(len(content) for name, content in images.items() if name not in self._images)
        for name, image in self._images.items():
            if over <= 0 or image.used_at > time_s - settings.keep_s:
                break
            if name not in images:
                changed[name] = None
                over -= image.size_bytes
        if over > 0:
            message = (
                f"{self.total_bytes} bytes are kept, and images.max_bytes allows {settings.max_bytes}; too few of them "
                f"were not used for images.keep_s ({settings.keep_s:g} s): try again later, or raise images.max_bytes"
            )
            raise ImagesFull.of("", message)
        removed = list(changed)
        changes = [StoredChange(name, None) for name in removed]
        for name, content in images.items():
            known = self._images.get(name)
            owners = frozenset([owner]) if known is None else known.owners | {owner}
            changed[name] = image = _KeptImage(len(content), owners, time_s)
            changes.append(StoredChange(name, image.record(), {CONTENT: content} if known is None else {}))

        def commit() -> list[str]:
            self._apply(changed)
            return removed

        return changes, commit

    def _apply(self, changed: Mapping[str, _KeptImage | None]) -> None:
        for name, image in changed.items():
            if (before := self._images.pop(name, None)) is not None:
                self.total_bytes -= before.size_bytes
            if image is not None:
                self._images[name] = image
                self.total_bytes += image.size_bytes

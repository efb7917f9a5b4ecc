"""The images that are kept: whose they are, when they were last used, and the room that they take. No I/O, no clock.

Times are seconds since 1970. Uses are not stored: for a store that starts, an image was used last when it was put. It
lets none expire for the whole time from then on, but those that were put long enough ago may make room at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import orjson

from deployments.images.failures import ImagesFull
from deployments.images.settings import ImagesSettings
from deployments.storage.storage import EntryName, StoredChange, StoredRecord
from deployments.storage.stored_state import Planned

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
        self._none_expires_until = time_s + settings.keep_s
        self._images: dict[str, _KeptImage] = {}
        self.total_bytes = 0
        self._bytes_of: defaultdict[str, int] = defaultdict(int)
        """By owner. An image of several owners counts for each."""
        found = ((stored, orjson.loads(stored.record)) for stored in kept)
        for stored, fields in sorted(found, key=lambda pair: pair[1]["used_at"]):
            used_at = min(fields["used_at"], time_s)
            image = _KeptImage(sum(stored.sizes.values()), frozenset(fields["owners"]), used_at)
            self._apply({stored.record_id: image})

    def __len__(self) -> int:
        return len(self._images)

    def __contains__(self, name: str) -> bool:
        return name in self._images

    def bytes_of(self, owner: str) -> int:
        return self._bytes_of.get(owner, 0)

    def refused(self, names: Iterable[str], owner: str) -> list[str]:
        """Those that are not kept, or not for this owner, each once."""
        return [name for name in dict.fromkeys(names) if not self._is_of(name, owner)]

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
        changed = self._room_for(images, owner, time_s - self._settings.keep_at_least_s)
        removed = [name for name, image in changed.items() if image is None]
        changes = [StoredChange(name, None if image is None else image.record()) for name, image in changed.items()]
        for name, content in images.items():
            if (known := self._images.get(name)) is None:
                image = _KeptImage(len(content), frozenset([owner]), time_s)
                changes.append(StoredChange(name, image.record(), {CONTENT: content}))
            else:
                image = replace(known, owners=known.owners | {owner}, used_at=time_s)
                changes.append(StoredChange(name, image.record()))
            changed[name] = image

        def commit() -> list[str]:
            self._apply(changed)
            return removed

        return changes, commit

    def time_passed(self, time_s: float) -> Planned[list[str]]:
        """Forgets images that nobody has used for `keep_s`. Returns their names."""
        images = self._images.items() if time_s >= self._none_expires_until else ()
        old = takewhile(lambda pair: time_s - pair[1].used_at >= self._settings.keep_s, images)
        expired = [name for name, _ in old]

        def commit() -> list[str]:
            self._apply(dict.fromkeys(expired))
            return expired

        return [StoredChange(name, None) for name in expired], commit

    def _room_for(self, images: Mapping[str, bytes], owner: str, used_before: float) -> dict[str, _KeptImage | None]:
        """The images that make room for others: with fewer owners, or `None` for those that go. Raises `ImagesFull`."""
        settings, changed = self._settings, dict[str, _KeptImage | None]()
        # In the order in which they go.
        unused = takewhile(lambda pair: pair[1].used_at <= used_before, self._images.items())
        candidates = [(name, image) for name, image in unused if name not in images]
        most_bytes = int(settings.max_bytes * settings.max_share) if owner else settings.max_bytes
        over = self.bytes_of(owner) - most_bytes
        over += sum(len(content) for name, content in images.items() if not self._is_of(name, owner))
        for name, image in candidates:
            if over > 0 and owner in image.owners:
                others = image.owners - {owner}
                changed[name] = replace(image, owners=others) if others else None
                over -= image.size_bytes
        if over > 0:
            share = f" x images.max_share ({settings.max_share:g})" if owner else ""
            raise self._full(f"{self.bytes_of(owner)} bytes of this caller", f"{share} allows {most_bytes}")
        over = self.total_bytes - settings.max_bytes
        over += sum(len(content) for name, content in images.items() if name not in self._images)
        over -= sum(image.size_bytes for name, image in candidates if changed.get(name, image) is None)
        for name, image in candidates:
            if over > 0 and changed.get(name, image) is not None:
                changed[name] = None
                over -= image.size_bytes
        if over > 0:
            raise self._full(f"{self.total_bytes} bytes of all callers", f" allows {settings.max_bytes}")
        return changed

    def _full(self, kept: str, allowed: str) -> ImagesFull:
        message = (
            f"{kept} are kept, and images.max_bytes{allowed}; too few of them can go, which have not been used for "
            f"images.keep_at_least_s ({self._settings.keep_at_least_s:g} s): try again later, or raise images.max_bytes"
        )
        return ImagesFull.of("", message)

    def _is_of(self, name: str, owner: str) -> bool:
        image = self._images.get(name)
        return image is not None and owner in image.owners

    def _apply(self, changed: Mapping[str, _KeptImage | None]) -> None:
        for name, image in changed.items():
            if (before := self._images.get(name)) is not None:
                self._count(before, -1)
                if image is None or image.used_at > before.used_at:
                    # One that was used is the last in the order.
                    del self._images[name]
            if image is not None:
                self._images[name] = image
                self._count(image, 1)

    def _count(self, image: _KeptImage, sign: int) -> None:
        self.total_bytes += sign * image.size_bytes
        for owner in image.owners:
            self._bytes_of[owner] += sign * image.size_bytes
            if not self._bytes_of[owner]:
                del self._bytes_of[owner]

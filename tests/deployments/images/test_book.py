"""The images that are kept: owners, uses, and what goes for others."""

from collections.abc import Mapping

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.images.book import ImageBook, ImagesFull, ImagesSettings
from deployments.storage.stored_state import Planned
from tests.fakes.storage import Kept, ScriptedStorage

SETTINGS = ImagesSettings.model_construct(keep_s=10, max_bytes=100)
NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True)


def size_of(name: str) -> int:
    return 5 * (1 + ord(name) - ord("a"))


class StoredBook:
    """A book whose changes go to a database at once."""

    def __init__(self, settings: ImagesSettings = SETTINGS) -> None:
        self.settings = settings
        self.storage = ScriptedStorage(Kept())
        self.book = ImageBook(settings, [], 0.0)

    def put(self, images: Mapping[str, int], owner: str = "", time_s: float = 0.0) -> list[str]:
        """Puts images of so many bytes. Returns the names of those that went for them."""
        return self._made(self.book.put({name: bytes(size) for name, size in images.items()}, owner, time_s))

    def reopened(self, time_s: float) -> ImageBook:
        """The book of a store that starts now."""
        return ImageBook(self.settings, self.storage.kept.loaded(), time_s)

    def _made(self, planned: Planned[list[str]]) -> list[str]:
        changes, commit = planned
        for change in changes:
            self.storage.change(change)
        return commit()


def test_without_room_a_put_is_refused_with_the_settings() -> None:
    stored = StoredBook()
    stored.put({"a": 60}, time_s=0)
    with pytest.raises(ImagesFull) as full:
        stored.put({"b": 41}, time_s=9)
    assert full.value.problems[0].message == (
        "60 bytes are kept, and images.max_bytes allows 100; too few of them were not used for images.keep_s (10 s): "
        "try again later, or raise images.max_bytes"
    )


class AnyImages(RuleBasedStateMachine):
    """A book whose store dies at times, against the images in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = StoredBook()
        self.now_s = 0.0
        self.used_at: dict[str, float] = {}
        """By name, the image that was used longest ago first."""
        self.put_at: dict[str, float] = {}
        self.owners: dict[str, set[str]] = {}

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(names=NAMES, owner=st.sampled_from(["", "ann", "bob"]))
    def put(self, names: list[str], owner: str) -> None:
        new = [name for name in names if name not in self.used_at]
        over = sum(map(size_of, [*self.used_at, *new])) - SETTINGS.max_bytes
        gone = list[str]()
        for name, used_at in self.used_at.items():
            if over > 0 and used_at <= self.now_s - SETTINGS.keep_s and name not in names:
                gone.append(name)
                over -= size_of(name)
        images = {name: size_of(name) for name in names}
        if over > 0:
            with pytest.raises(ImagesFull):
                self.stored.put(images, owner, self.now_s)
            return
        changes, _ = self.stored.book.put({name: bytes(size) for name, size in images.items()}, owner, self.now_s)
        assert [change.record_id for change in changes if change.added] == new, "a content is stored once"
        assert self.stored.put(images, owner, self.now_s) == gone
        for known in (self.used_at, self.put_at, self.owners):
            for name in gone:
                del known[name]
        for name in names:
            self.put_at[name] = self.now_s
            self.owners.setdefault(name, set()).add(owner)
        self.move_to_the_end(names)

    @rule(names=NAMES)
    def use(self, names: list[str]) -> None:
        self.stored.book.use(names, self.now_s)
        self.move_to_the_end([name for name in names if name in self.used_at])

    @rule()
    def store_dies(self) -> None:
        """What was used since it was put is forgotten."""
        self.stored.book = self.stored.reopened(self.now_s)
        in_database = {name: place for place, name in enumerate(self.stored.storage.kept.records)}
        order = sorted(self.put_at, key=lambda name: (self.put_at[name], in_database[name]))
        self.used_at = {name: self.put_at[name] for name in order}

    def move_to_the_end(self, names: list[str]) -> None:
        for name in names:
            self.used_at.pop(name, None)
            self.used_at[name] = self.now_s

    @invariant()
    def images_and_owners_are_those(self) -> None:
        book = self.stored.book
        for owner in ("", "ann", "bob"):
            kept = [name for name in "abcdefgh" if owner in self.owners.get(name, ())]
            assert book.refused("abcdefgh", owner) == [name for name in "abcdefgh" if name not in kept]
        assert {name for name in "abcdefgh" if name in book} == self.used_at.keys()
        assert self.stored.storage.kept.records.keys() == self.used_at.keys()
        assert book.total_bytes == sum(map(size_of, self.used_at)) <= SETTINGS.max_bytes


TestAnyImages = AnyImages.TestCase

"""The images that are kept: owners, uses, and what goes for others."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.images.book import CONTENT, ImageBook, ImagesFull, ImagesSettings
from deployments.storage.storage import StoredRecord
from deployments.storage.stored_state import Planned
from tests.deployments.storage.scripted_storage import Kept, ScriptedStorage

SETTINGS = ImagesSettings.model_construct(keep_s=10, max_bytes=100)


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
        kept = self.storage.kept
        sizes = {name: {entry: len(data) for entry, data in kept.entries[name].items()} for name in kept.records}
        records = [StoredRecord(name, record, sizes[name]) for name, record in kept.records.items()]
        return ImageBook(self.settings, records, time_s)

    def _made(self, planned: Planned[list[str]]) -> list[str]:
        changes, commit = planned
        for change in changes:
            self.storage._apply(change)
        return commit()


def names_of(book: ImageBook, names: Sequence[str] = "abcdef") -> str:
    return "".join(name for name in names if name in book)


def test_an_image_is_its_owners_alone() -> None:
    stored = StoredBook()
    stored.put({"a": 1}, "ann")
    stored.put({"a": 1, "b": 2}, "bob")
    assert stored.book.refused(["a", "b", "c", "b"], "ann") == ["b", "c"]
    assert stored.book.refused(["a", "b"], "bob") == []
    assert stored.book.refused(["a", "b"], "") == ["a", "b"]
    assert stored.book.total_bytes == 3


def test_putting_an_image_again_is_a_use_and_stores_its_content_once() -> None:
    stored = StoredBook()
    stored.put({"a": 3}, time_s=0)
    changes, commit = stored.book.put({"a": bytes(3)}, "", 60.0)
    assert [(change.record_id, dict(change.added)) for change in changes] == [("a", {})]
    assert commit() == []
    assert stored.book.total_bytes == 3
    with pytest.raises(ImagesFull):
        stored.put({"b": 98}, time_s=69)
    assert stored.put({"b": 98}, time_s=70) == ["a"]


def test_after_a_restart_those_make_room_that_were_put_long_enough_ago() -> None:
    stored = StoredBook()
    stored.put({"a": 60}, time_s=0.0)
    stored.put({"b": 40}, time_s=8.0)
    stored.book = stored.reopened(9.0)
    with pytest.raises(ImagesFull):
        stored.put({"c": 60}, time_s=9.9)
    assert stored.put({"c": 60}, time_s=10.0) == ["a"]
    stored.book.use(["b"], 17.0)
    with pytest.raises(ImagesFull):
        stored.put({"d": 10}, time_s=18.0)


def test_a_restart_keeps_the_order_in_which_images_were_put() -> None:
    stored = StoredBook()
    for time_s, name in enumerate("cab"):
        stored.put({name: 30}, time_s=time_s)
    stored.book = stored.reopened(5.0)
    assert stored.put({"d": 60}, time_s=20) == ["c", "a"]


def test_without_room_those_go_that_were_not_used_for_the_longest_time() -> None:
    stored = StoredBook()
    for time_s, name in enumerate("abc"):
        stored.put({name: 30}, time_s=time_s)
    stored.book.use(["a"], 5)
    assert stored.put({"d": 40}, time_s=20) == ["b"]
    assert names_of(stored.book) == "acd"
    assert stored.put({"e": 60}, time_s=20) == ["c", "a"]
    assert (names_of(stored.book), stored.book.total_bytes) == ("de", 100)


def test_an_image_that_is_put_again_goes_last() -> None:
    stored = StoredBook()
    for time_s, name in enumerate("aba"):
        stored.put({name: 30}, time_s=time_s)
    assert stored.put({"c": 60}, time_s=20) == ["b"]


def test_an_image_of_another_key_makes_room_too() -> None:
    stored = StoredBook()
    stored.put({"a": 50}, "ann", 0)
    stored.put({"b": 50}, "bob", 5)
    assert stored.put({"c": 1}, "cid", 14) == ["a"]
    assert stored.book.refused("abc", "ann") == ["a", "b", "c"]


def test_what_was_used_a_moment_ago_does_not_go() -> None:
    stored = StoredBook()
    stored.put({"a": 50}, time_s=0)
    stored.put({"b": 50}, time_s=5)
    with pytest.raises(ImagesFull) as full:
        stored.put({"c": 51}, time_s=14)
    assert full.value.problems[0].message == (
        "100 bytes are kept, and images.max_bytes allows 100; too few of them were not used for images.keep_s (10 s): "
        "try again later, or raise images.max_bytes"
    )
    assert (names_of(stored.book), stored.book.total_bytes) == ("ab", 100)
    assert stored.put({"c": 51}, time_s=15) == ["a", "b"]


def test_a_put_makes_no_room_at_the_cost_of_what_it_puts() -> None:
    stored = StoredBook()
    stored.put({"a": 50, "b": 50}, time_s=0)
    assert stored.put({"a": 50, "c": 30}, time_s=50) == ["b"]
    assert names_of(stored.book) == "ac"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "use", "reopen"]),
            st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True),
            st.sampled_from(["", "ann", "bob"]),
            st.integers(0, 30),
        ),
        max_size=40,
    )
)
def test_bounds_hold_always_and_a_new_store_finds_the_same_images(
    calls: list[tuple[str, list[str], str, int]],
) -> None:
    stored = StoredBook()
    now_s, used_at, put_at = 0.0, dict[str, float](), dict[str, float]()
    for call, names, owner, seconds in calls:
        now_s += seconds
        if call == "put":
            images = {name: 5 * (1 + ord(name) - ord("a")) for name in names}
            try:
                gone = stored.put(images, owner, now_s)
            except ImagesFull:
                continue
            assert stored.book.refused(names, owner) == []
            assert all(now_s - used_at[name] >= SETTINGS.keep_s for name in gone)
            used_at |= dict.fromkeys(names, now_s)
            put_at |= dict.fromkeys(names, now_s)
        elif call == "use":
            stored.book.use(names, now_s)
            used_at |= dict.fromkeys(names, now_s)
        else:
            before, stored.book = stored.book, stored.reopened(now_s)
            used_at = dict(put_at)
            assert [(name in before) for name in "abcdefgh"] == [(name in stored.book) for name in "abcdefgh"]
            assert [before.refused("abcdefgh", one) for one in ("", "ann")] == [
                stored.book.refused("abcdefgh", one) for one in ("", "ann")
            ]
        assert stored.book.total_bytes <= SETTINGS.max_bytes
        kept = {name for name in "abcdefgh" if name in stored.book}
        assert stored.storage.kept.records.keys() == kept == stored.storage.kept.entries.keys()
        assert stored.book.total_bytes == sum(len(stored.storage.kept.entries[name][CONTENT]) for name in kept)

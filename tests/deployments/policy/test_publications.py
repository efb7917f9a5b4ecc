"""Which version of a folder is next, and what it is made of."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.published import MOST_REFUSED, HeldVersions, Publication, Publications

Change = Callable[[Publication], Publication]


def whole(version: int) -> Publication:
    return Publication(version, f"/f/weight_v{version:06d}", fingerprint="a")


def delta(version: int, base: int | None = None) -> Publication:
    return replace(whole(version), base=version - 1 if base is None else base)


def folder(*found: Publication, takes_deltas: bool = True) -> Publications:
    publications = Publications(takes_deltas)
    publications.observe(found, max((each.version for each in found), default=0))
    return publications


def made_of(publications: Publications, held: HeldVersions = HeldVersions()) -> tuple[int | None, list[int]] | None:  # noqa: B008 - is frozen
    chain = publications.next(held)
    return None if chain is None else (chain.seed, [link.version for link in chain.links])


def test_the_newest_whole_checkpoint_is_taken_alone() -> None:
    assert made_of(folder(whole(1), whole(2))) == (None, [2])


def test_deltas_begin_with_the_weights_that_are_held_with_the_highest_number_among_their_bases() -> None:
    held = HeldVersions(current=2, taken=2, with_weights=(0, 1, 2))
    assert made_of(folder(delta(1), delta(2), delta(3), delta(4)), held) == (2, [3, 4])


def test_deltas_begin_with_the_last_whole_checkpoint_where_nothing_on_their_way_is_held() -> None:
    assert made_of(folder(delta(1), whole(2), delta(3))) == (None, [2, 3])


def test_a_version_that_is_not_whole_is_waited_for_and_the_one_before_is_taken_meanwhile() -> None:
    found = folder(whole(1), replace(whole(2), missing="a file is not there yet"))
    assert made_of(found) == (None, [1])
    assert found.waiting == "version 2: a file is not there yet"


def test_nothing_at_or_below_the_current_version_is_taken_whoever_pushed_it() -> None:
    found = folder(whole(4))
    assert made_of(found, HeldVersions(current=4)) is None
    assert found.waiting == (
        "the folder's newest version is 4, and 4 is current. Numbers only go up: "
        "publish from 5 on, or give a new run a service with another policy.run"
    )
    assert made_of(found, HeldVersions(current=4, taken=4, with_weights=(0, 4))) is None
    assert found.waiting is None


def test_a_refused_version_is_tried_again_once_its_files_have_changed() -> None:
    found = folder(whole(1))
    found.refuse(whole(1), "it holds NaN", is_broken=False)
    assert (made_of(found), found.waiting) == (None, "version 1 is refused: it holds NaN")
    found.observe([whole(1)], 1)
    assert made_of(found) is None
    found.observe([replace(whole(1), fingerprint="b")], 1)
    assert made_of(found) == (None, [1])


def test_a_delta_of_a_version_that_cannot_be_served_is_made_and_one_of_a_damaged_version_is_not() -> None:
    found = folder(delta(1), delta(2))
    found.refuse(delta(1), "it holds NaN", is_broken=False)
    assert made_of(found) == (0, [1, 2])
    found.refuse(delta(1), "it is damaged", is_broken=True)
    assert (made_of(found), found.waiting) == (None, "version 2 needs version 1: it is damaged")


def test_what_no_version_can_be_made_with_is_refused_as_soon_as_it_is_seen() -> None:
    found = Publications(takes_deltas=False)
    refused = found.observe([delta(1), replace(whole(2), problem="its index cannot be read")], 2)
    assert [(each.version, each.reason) for each in refused] == [
        (1, "it is a delta, which policy.follow.format: miles_disk_delta takes"),
        (2, "its index cannot be read"),
    ]
    assert found.observe([delta(1), replace(whole(2), problem="its index cannot be read")], 2) == []
    [circular] = Publications(takes_deltas=True).observe([delta(3, base=3)], 3)
    assert circular.reason == "it is a delta of version 3, which does not come before it"


def test_the_last_refusals_are_remembered() -> None:
    found = folder(*map(whole, range(1, 41)))
    for version in range(1, 41):
        found.refuse(whole(version), "no", is_broken=True)
    refused = found.state("/f", HeldVersions()).refused
    assert [each.version for each in refused] == [*range(41 - MOST_REFUSED, 41)]


@st.composite
def folders(draw: st.DrawFn) -> list[Publication]:
    numbers = draw(st.sets(st.integers(1, 9)))
    changes: list[Change] = [
        lambda one: one,
        lambda one: replace(one, base=one.version - 1),
        lambda one: replace(one, missing="not there"),
    ]
    return [draw(st.sampled_from(changes))(whole(number)) for number in sorted(numbers)]


@given(folders(), st.integers(0, 9), st.sets(st.integers(1, 9)))
def test_a_chain_ends_in_a_version_above_the_current_one_and_each_link_is_a_delta_of_what_comes_before(
    found: list[Publication], current: int, held: set[int]
) -> None:
    chain = folder(*found).next(HeldVersions(current, max(held, default=0), {0, *held}))
    if chain is None:
        return
    before = [chain.seed, *(link.version for link in chain.links)]
    assert chain.version == chain.links[-1].version > current
    assert [link.base for link in chain.links] == before[:-1]
    assert all(link.missing is None for link in chain.links)
    assert chain.seed is None or chain.seed in {0, *held}

"""Versions in a folder: what is seen of them, which one is next, and what it is made of."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from deployments.policy import published
from deployments.policy.published import MOST_REFUSED, HeldVersions, Publication, Publications, PublishedFolder
from tests.deployments.policy.policy_world import weights
from tests.deployments.policy.published_files import INDEX, publish_delta, publish_whole


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


def test_a_version_is_made_of_the_nearest_weights_and_the_deltas_since() -> None:
    assert made_of(folder(whole(1), whole(2))) == (None, [2])
    held = HeldVersions(current=2, taken=2, with_weights=(0, 1, 2))
    assert made_of(folder(delta(1), delta(2), delta(3), delta(4)), held) == (2, [3, 4])
    assert made_of(folder(delta(1), whole(2), delta(3))) == (None, [2, 3])
    found = folder(whole(1), replace(whole(2), missing="a file is not there yet"))
    assert made_of(found) == (None, [1])
    assert found.waiting == "version 2: a file is not there yet"


def test_a_delta_whose_base_is_nowhere_waits_for_a_whole_checkpoint() -> None:
    found = folder(delta(9))
    assert (made_of(found), found.waiting) == (
        None,
        "version 9: it is a delta of version 8, which is neither in the folder nor stored with its weights "
        "(policy.keep_versions); publish a whole checkpoint",
    )
    found.observe([delta(9), whole(10)], 10)
    assert (made_of(found), found.waiting) == ((None, [10]), None)


def test_nothing_at_or_below_the_current_version_is_taken() -> None:
    found = folder(whole(4))
    assert made_of(found, HeldVersions(current=4)) is None
    assert found.waiting == (
        "the folder's newest version is 4, and 4 is current. Numbers only go up: "
        "publish from 5 on, or give a new run a service with another policy.run"
    )
    for current in (4, 9):
        assert made_of(found, HeldVersions(current, taken=4)) is None
        assert found.waiting is None, "after pushes beyond it nothing waits either"


def test_a_refused_version_is_tried_again_once_its_files_have_changed() -> None:
    found = folder(whole(1))
    found.refuse(whole(1), "it holds NaN", is_broken=False)
    assert (made_of(found), found.waiting) == (None, "version 1 is refused: it holds NaN")
    found.observe([whole(1)], 1)
    assert made_of(found) is None
    found.observe([replace(whole(1), fingerprint="b")], 1)
    assert made_of(found) == (None, [1])


def test_a_delta_of_a_refused_version_is_made_but_of_a_damaged_one_not() -> None:
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
    assert [each.version for each in found.state("/f", HeldVersions()).refused] == [*range(41 - MOST_REFUSED, 41)]


# The folder


@pytest.fixture
def in_memory() -> Iterator[str]:
    """The URL of a folder in fsspec's memory."""
    url = f"memory://{uuid4().hex}"
    yield url
    fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)


def one(folder: PublishedFolder, above: int = 0) -> Publication:
    [publication], _ = folder.look(above)
    return publication


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert PublishedFolder(str(tmp_path / "later")).look(0) == ([], 0)


@pytest.mark.parametrize("name", ["weight_v000007", "step-7", "7", "global_step_7"])
def test_a_subfolder_is_the_version_in_whose_number_its_name_ends(tmp_path: Path, name: str) -> None:
    place = publish_whole(tmp_path, 1, weights(2.0)).rename(tmp_path / name)
    if name == "7":
        # A file without an index is a checkpoint too.
        (place / INDEX).unlink()
        (place / "model-00001-of-00001.safetensors").rename(place / "model.safetensors")
    found = one(PublishedFolder(str(tmp_path)))
    assert (found.version, found.location, found.missing, found.base) == (7, f"{tmp_path}/{name}", None, None)


@pytest.mark.parametrize("name", [".step-7", "tmp-step-7", "_step-7", "step-7.partial", "step-0", "final"])
def test_other_names_are_passed_over(tmp_path: Path, name: str) -> None:
    publish_whole(tmp_path, 1, weights(2.0)).rename(tmp_path / name)
    (tmp_path / "step-9").write_text("a file")
    (tmp_path / "latest-8").symlink_to(tmp_path / name)
    assert PublishedFolder(str(tmp_path)).look(0) == ([], 0)


def test_a_checkpoint_is_whole_once_its_index_and_its_files_are_there(tmp_path: Path) -> None:
    place, folder = publish_whole(tmp_path, 1, weights(2.0)), PublishedFolder(str(tmp_path))
    file, index = place / "model-00001-of-00001.safetensors", place / INDEX
    content, listed = file.read_bytes(), index.read_bytes()
    for path, data, missing in (
        (index, listed[:9], "not all of it is there"),
        (index, None, f"{INDEX} is not there yet"),
        (index, listed, "None"),
        (file, content[:-1], "it is not whole"),
        (file, None, f"{file.name} is not there yet"),
        (file, content, "None"),
    ):
        path.unlink() if data is None else path.write_bytes(data)
        assert missing in str(one(folder).missing)


def test_versions_that_are_not_asked_for_are_counted_alone(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        publish_whole(tmp_path, version, weights(2.0))
    found, newest = PublishedFolder(str(tmp_path)).look(2)
    assert ([each.version for each in found], newest) == ([3], 3)
    assert PublishedFolder(str(tmp_path)).look(3) == ([], 3)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "../../etc/passwd"}}, "names ../../etc/passwd, which does not lie in the folder"),
        ({"weight_map": ["a"]}, "is not the index of a checkpoint or of a delta: AttributeError"),
        ({}, "is not the index of a checkpoint or of a delta: KeyError('weight_map')"),
        ({"weight_map": {}, "metadata": {"delta_encoding": "xor", "base_version": "x"}}, "of a delta: ValueError"),
    ],
)
def test_an_index_that_cannot_be_used_is_a_problem_of_its_version(tmp_path: Path, index: Any, problem: str) -> None:
    (publish_whole(tmp_path, 1, weights(2.0)) / INDEX).write_text(json.dumps(index))
    found = one(PublishedFolder(str(tmp_path)))
    assert (problem in str(found.problem), found.missing) == (True, None)


def test_files_are_read_again_only_once_they_have_changed(tmp_path: Path) -> None:
    place = publish_delta(tmp_path, 1, weights(1.0), weights(2.0))
    folder = PublishedFolder(str(tmp_path))
    first = one(folder)
    assert first.base == 0
    with patch.object(published, "read_index", side_effect=AssertionError):
        assert one(folder) is first
    (place / INDEX).write_text((place / INDEX).read_text().replace("000000", "000001"))
    assert one(folder).fingerprint != first.fingerprint


def test_a_url_is_read_as_a_path_is(in_memory: str, tmp_path: Path) -> None:
    place = publish_delta(tmp_path, 1, weights(1.0), weights(2.0))
    folder = PublishedFolder(f"{in_memory}/")
    assert folder.look(0) == ([], 0)
    fsspec.filesystem("memory").put(str(place), in_memory.removeprefix("memory:/") + "/", recursive=True)
    found = one(folder)
    assert (found.location, found.missing, found.base) == (f"{in_memory}/weight_v000001", None, 0)


class ListedOnce(MemoryFileSystem):  # type: ignore[misc]
    """Remembers what it has listed, as the file systems of object stores do."""

    protocol = "listed-once"
    listed: ClassVar[dict[str, Any]] = {}

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if path not in self.listed:
            self.listed[path] = super().ls(path, detail, **options)
        return self.listed[path]

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.replace("listed-once://", "memory://"))

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()


def test_a_file_system_that_remembers_what_it_has_listed_lists_anew(in_memory: str) -> None:
    fsspec.register_implementation("listed-once", ListedOnce, clobber=True)
    folder, root = PublishedFolder(in_memory.replace("memory", "listed-once")), in_memory.removeprefix("memory:/")
    file_system = fsspec.filesystem("memory")
    for version in (1, 2):
        file_system.pipe_file(f"{root}/{version}/model.safetensors", weights(1.0))
        assert folder.look(0)[1] == version

"""What is seen of a folder in which versions are published."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch
from uuid import uuid4

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from deployments.policy import published
from deployments.policy.published import Publication, PublishedFolder
from tests.deployments.policy.policy_world import weights
from tests.deployments.policy.published_files import INDEX, publish_delta, publish_whole
from tests.deployments.policy.test_following import BASE


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
    publish_whole(tmp_path, 1, weights(2.0)).rename(tmp_path / name)
    found = one(PublishedFolder(str(tmp_path)))
    assert (found.version, found.location, found.missing, found.base) == (7, f"{tmp_path}/{name}", None, None)


@pytest.mark.parametrize("name", [".step-7", "tmp-step-7", "_step-7", "step-7.partial", "step-0", "final"])
def test_other_names_are_passed_over(tmp_path: Path, name: str) -> None:
    publish_whole(tmp_path, 1, weights(2.0)).rename(tmp_path / name)
    (tmp_path / "step-9").write_text("a file")
    (tmp_path / "latest-8").symlink_to(tmp_path / name)
    assert PublishedFolder(str(tmp_path)).look(0) == ([], 0)


def test_a_file_without_an_index_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.safetensors").write_bytes(BASE)
    found = one(PublishedFolder(str(tmp_path)))
    assert (found.missing, found.base) == (None, None)


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
    place = publish_whole(tmp_path, 1, weights(2.0))
    (place / INDEX).write_text(json.dumps(index))
    found = one(PublishedFolder(str(tmp_path)))
    assert (problem in str(found.problem), found.missing) == (True, None)


def test_files_are_read_again_only_once_they_have_changed(tmp_path: Path) -> None:
    place = publish_delta(tmp_path, 1, BASE, weights(2.0))
    folder = PublishedFolder(str(tmp_path))
    first = one(folder)
    assert first.base == 0
    with patch.object(published, "read_index", side_effect=AssertionError):
        assert one(folder) is first
    (place / INDEX).write_text((place / INDEX).read_text().replace("000000", "000001"))
    assert one(folder).fingerprint != first.fingerprint


def test_a_url_is_read_as_a_path_is(in_memory: str, tmp_path: Path) -> None:
    publish_delta(tmp_path, 1, BASE, weights(2.0))
    file_system = fsspec.filesystem("memory")
    folder = PublishedFolder(f"{in_memory}/")
    assert folder.look(0) == ([], 0)
    root = in_memory.removeprefix("memory:/")
    [data] = (tmp_path / "weight_v000001").glob("*.safetensors")
    file_system.put(str(tmp_path / "weight_v000001" / INDEX), f"{root}/weight_v000001/{INDEX}")
    assert one(folder).missing == f"{data.name} is not there yet"
    file_system.put(str(data), f"{root}/weight_v000001/{data.name}")
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
        file_system.pipe_file(f"{root}/{version}/model.safetensors", BASE)
        assert folder.look(0)[1] == version

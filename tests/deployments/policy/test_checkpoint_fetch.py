"""Checkpoints that the service reads itself: what lies under the roots, and every way to lead out of them."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from safetensors.torch import save

from deployments.policy.assembly import fetch_checkpoint, write_checkpoint
from deployments.policy.failures import SourceRefused
from deployments.policy.weight_checks import validate_full
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.weight_files import GOOD, LAYOUT, Bomb, written

CONFIGURED = "policy.checkpoint_roots of the service's config"


def fetch(location: object, roots: list[str], tmp_path: Path) -> Path:
    return fetch_checkpoint(str(location), roots, tmp_path / "fetched")


def source_refusal(location: object, roots: list[str], tmp_path: Path) -> str:
    with pytest.raises(SourceRefused) as refused:
        fetch(location, roots, tmp_path)
    [problem] = refused.value.problems
    assert (problem.field, problem.value) == ("checkpoint", str(location))
    assert not (tmp_path / "fetched").exists() or not any((tmp_path / "fetched").iterdir())
    return problem.message


def test_a_checkpoint_under_a_root_is_read_where_it_lies(roots: Path, tmp_path: Path) -> None:
    for location in (
        roots / "step-1",
        f"{roots}/step-1/",
        f"file://{roots}/step-1",
        roots / "x" / ".." / "step-1",
        f"{roots}//step-1/.",
    ):
        assert fetch(location, ["/elsewhere", f"{roots}/"], tmp_path) == roots / "step-1"
    file = roots / "step-1" / "model.safetensors"
    assert fetch(file, [str(roots)], tmp_path) == file
    assert fetch(roots / "step-1", [f"file://{roots}/step-1"], tmp_path) == roots / "step-1"
    assert fetch(roots / "step-1", ["/"], tmp_path) == roots / "step-1"
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize(
    "location",
    [
        "{outside}",
        "{roots}-evil",
        "{roots}/../outside",
        "{roots}/step-1/../../outside",
        "file://{outside}",
        "file://{roots}/../outside",
        "{roots}/link",
        "{roots}/link/model.safetensors",
        "{roots}/linked",
        "{roots}/linked/model.safetensors",
        "FILE://{roots}/step-1",
        "local://{roots}/step-1",
        "relative",
        "",
        "/",
        "~/step-1",
        "memory://roots/step-1",
        "simplecache::file://{roots}/step-1",
    ],
)
def test_what_lies_outside_the_roots_is_not_read(roots: Path, tmp_path: Path, location: str) -> None:
    outside = written(tmp_path / "outside" / "model.safetensors", GOOD).parent
    written(tmp_path / "roots-evil" / "model.safetensors", GOOD)
    (roots / "link").symlink_to(outside)
    (roots / "linked").mkdir()
    (roots / "linked" / "model.safetensors").symlink_to(outside / "model.safetensors")
    place = location.format(outside=outside, roots=roots)
    message = source_refusal(place, ["/elsewhere", str(roots)], tmp_path)
    assert message == f"it lies outside the roots that weights may be read from ({CONFIGURED})"


def test_links_within_the_roots_are_followed(roots: Path, tmp_path: Path) -> None:
    """As in the cache of the hub: snapshots hold links to blobs."""
    (roots / "snapshot").mkdir()
    (roots / "snapshot" / "model.safetensors").symlink_to("../step-1/model.safetensors")
    checkpoint = fetch(roots / "snapshot", [str(roots)], tmp_path)
    write_checkpoint(checkpoint, tmp_path / "full")
    assert validate_full(tmp_path / "full", LAYOUT) == file_checksum(roots / "step-1" / "model.safetensors")


def test_without_roots_nothing_is_read(roots: Path, tmp_path: Path) -> None:
    message = (
        "it lies outside the roots that weights may be read from "
        "(none is configured; policy.checkpoint_roots of the service's config names them)"
    )
    for location in (roots, "/", "memory://a"):
        assert source_refusal(location, [], tmp_path) == message


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("{roots}/none", "it cannot be read: nothing is there"),
        ("{roots}/a\0b", "it cannot be read: ValueError: "),
        ("{roots}/circle", "it cannot be read: "),
        ("memory://roots/none", "it cannot be read: nothing is there"),
        ("memory://[roots", "it cannot be read: ValueError: "),
        ("unheard-of://roots/a", "it cannot be read: ValueError: "),
        ("memory://roots/%2e%2e/a", "it cannot be read: ValueError: "),
    ],
)
def test_a_place_that_cannot_be_read_is_refused(roots: Path, tmp_path: Path, location: str, says: str) -> None:
    (roots / "circle").symlink_to("circle")
    place = location.format(roots=roots)
    message = source_refusal(place, [str(roots), "memory://roots", "unheard-of://roots"], tmp_path)
    assert message.startswith(says)
    assert str(roots) not in message


@pytest.fixture
def memory() -> Iterator[Any]:
    file_system = fsspec.filesystem("memory")
    yield file_system
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]


def test_a_file_behind_a_url_is_fetched(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/roots/step-1/policy.safetensors", save(GOOD))
    fetched = fetch("memory://roots/step-1/../step-1/policy.safetensors", ["memory://roots/"], tmp_path)
    assert fetched == tmp_path / "fetched" / "policy.safetensors"
    assert validate_full(fetched, LAYOUT) == file_checksum(fetched)


def test_a_folder_behind_a_url_is_fetched_as_far_as_it_is_a_checkpoint(memory: Any, tmp_path: Path) -> None:
    shards = {
        "model-1.safetensors": {"embed.weight": GOOD["embed.weight"]},
        "model-2.safetensors": {"norm.weight": GOOD["norm.weight"], "scale": GOOD["scale"]},
    }
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    for name, tensors in shards.items():
        memory.pipe(f"/roots/step-1/{name}", save(tensors))
    memory.pipe("/roots/step-1/model.safetensors.index.json", json.dumps(index).encode())
    memory.pipe("/roots/step-1/optimizer.bin", b"large")
    memory.pipe("/roots/step-1/deeper/model-3.safetensors", b"other")
    fetched = fetch("memory://roots/step-1/", ["memory://roots"], tmp_path)
    assert sorted(path.name for path in fetched.iterdir()) == [*sorted(shards), "model.safetensors.index.json"]
    write_checkpoint(fetched, tmp_path / "full")
    assert validate_full(tmp_path / "full", LAYOUT) == file_checksum(written(tmp_path / "good", GOOD))


@pytest.mark.parametrize("location", ["memory://roots/../secret", "memory://roots-evil/a", "memory://other/a"])
def test_a_url_outside_the_roots_is_not_fetched(memory: Any, tmp_path: Path, location: str) -> None:
    for folder in ("/secret", "/roots-evil/a", "/other/a"):
        memory.pipe(f"{folder}/model.safetensors", save(GOOD))
    expected = f"it lies outside the roots that weights may be read from ({CONFIGURED})"
    assert source_refusal(location, ["memory://roots/inner"], tmp_path) == expected


def test_a_folder_of_pickles_behind_a_url_is_refused(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/roots/step-1/pytorch_model.bin", pickle.dumps(Bomb()))
    location = "memory://roots/step-1"
    assert source_refusal(location, ["memory://roots"], tmp_path) == "it cannot be read: nothing is there"

"""Full weights as one file: of streams, checkpoints, adapters, partial weights and deltas; and what is read at all."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from deployments.policy.assembly import (
    fetch_checkpoint,
    unpack_zstd,
    write_adapter,
    write_applied,
    write_checkpoint,
    write_completed,
)
from deployments.policy.failures import SourceRefused, WeightsRefused
from deployments.policy.weight_checks import validate_full
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import header_bytes, header_of
from tests.deployments.policy.weight_files import GOOD, LAYOUT, Bomb, adapter, delta_of, refusal, written


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path} holds no adapter_model.safetensors: save the adapter with save_pretrained of PEFT"
    assert refusal(write_adapter, tmp_path, tmp_path / "packed") == [("weights", message)]
    adapter(tmp_path, "{")
    [(field, said)] = refusal(write_adapter, tmp_path, tmp_path / "packed")
    assert (field, said.startswith(f"{tmp_path / 'adapter_config.json'} is not JSON: ")) == ("weights", True)


def test_a_base_that_was_removed_meanwhile_asks_for_full_weights(tmp_path: Path) -> None:
    partial = written(tmp_path / "partial", {"scale": GOOD["scale"]})
    message = "newer versions have taken the place of the base; send full weights"
    assert refusal(write_completed, tmp_path / "base", partial, tmp_path / "full") == [("base", message)]


def packed(content: bytes, window_log: int) -> bytes:
    """A stream whose reader needs a window of so many bytes."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


CONTENT = np.random.default_rng(0).bytes(100_000)


@pytest.mark.parametrize(
    "stream",
    [
        zstandard.compress(CONTENT),
        b"".join(zstandard.compress(CONTENT[begin : begin + 40_000]) for begin in range(0, 100_000, 40_000)),
        packed(CONTENT, window_log=27),
    ],
)
def test_what_was_packed_is_unpacked(tmp_path: Path, stream: bytes) -> None:
    (tmp_path / "packed").write_bytes(stream)
    unpack_zstd(tmp_path / "packed", tmp_path / "a", len(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (zstandard.compress(bytes(2**26)), "more than 1048576 bytes"),
        (packed(b"content", window_log=28), "too much memory"),
        (save(GOOD), "the bytes are not a zstd stream, as Content-Encoding says"),
    ],
)
def test_a_stream_that_cannot_be_unpacked_is_refused_while_small(tmp_path: Path, stream: bytes, says: str) -> None:
    (tmp_path / "packed").write_bytes(stream)
    [(field, message)] = refusal(unpack_zstd, tmp_path / "packed", tmp_path / "a", 2**20)
    assert (field, says in message) == ("weights", True)
    assert (tmp_path / "a").stat().st_size <= 2**20


@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_stream_that_was_cut_off_is_refused_at_last(tmp_path: Path, kept: int) -> None:
    (tmp_path / "packed").write_bytes(zstandard.compress(save(GOOD))[:kept])

    def unpacked_and_checked() -> None:
        unpack_zstd(tmp_path / "packed", tmp_path / "a", 2**30)
        validate_full(tmp_path / "a", LAYOUT)

    assert refusal(unpacked_and_checked)[0][0] == "weights"


def test_a_folder_with_only_pickles_is_refused_and_none_of_them_read(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    expected = [("weights", f"{tmp_path / 'step'} holds no .safetensors file")]
    assert refusal(write_checkpoint, tmp_path / "step", tmp_path / "full") == expected
    file = tmp_path / "step" / "pytorch_model.bin"
    expected = [("weights", f"{file} is a pickle or an archive: save the weights as safetensors")]
    assert refusal(write_checkpoint, file, tmp_path / "full") == expected


@pytest.mark.parametrize("name", ["../step-1/model.safetensors", "/etc/hosts", "deeper/a.safetensors"])
def test_an_index_that_leads_out_of_its_folder_is_refused(roots: Path, tmp_path: Path, name: str) -> None:
    folder = roots / "step-2"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    [(field, message)] = refusal(write_checkpoint, folder, tmp_path / "full")
    assert (field, f"{name} does not lie in the folder" in message) == ("weights", True)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / "step" / f"{name}.safetensors", GOOD)
    [(field, message)] = refusal(write_checkpoint, tmp_path / "step", tmp_path / "full")
    assert (field, "and so does another file" in message) == ("weights", True)


# Deltas


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(st.binary(min_size=24, max_size=24), st.binary(min_size=24, max_size=24), st.integers(0, 64))
def test_a_delta_gives_the_new_weights_bit_for_bit(tmp_path: Path, before: bytes, after: bytes, padding: int) -> None:
    """The header stays as it is, with its metadata and its padding."""
    header = header_of([("a", "F32", (3,)), ("empty", "F32", (0, 4)), ("b", "BF16", (2, 3))])
    written_header = header_bytes(header.entries, {"format": "pt"})
    length = int.from_bytes(written_header[:8], "little") + padding
    start = length.to_bytes(8, "little") + written_header[8:] + b" " * padding
    base, new = tmp_path / "base", tmp_path / "new"
    base.write_bytes(start + before)
    new.write_bytes(start + after)
    checksum = write_applied(base, delta_of(base, new, tmp_path / "delta"), tmp_path / "full")
    assert (tmp_path / "full").read_bytes() == start + after
    assert checksum == file_checksum(new)


def test_a_base_that_was_cut_short_is_found_out(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    base.write_bytes(base.read_bytes()[:-1])
    with pytest.raises(WeightsRefused, match="it is not whole"):
        write_applied(base, written(tmp_path / "delta", {}), tmp_path / "full")


# Checkpoints that the service reads itself: every way to lead out of the roots

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
    message = source_refusal(location.format(outside=outside, roots=roots), ["/elsewhere", str(roots)], tmp_path)
    assert message == f"it lies outside the roots that weights may be read from ({CONFIGURED})"


def test_links_within_the_roots_are_followed(roots: Path, tmp_path: Path) -> None:
    """As in the cache of the hub: snapshots hold links to blobs."""
    (roots / "snapshot").mkdir()
    (roots / "snapshot" / "model.safetensors").symlink_to("../step-1/model.safetensors")
    write_checkpoint(fetch(roots / "snapshot", [str(roots)], tmp_path), tmp_path / "full")
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

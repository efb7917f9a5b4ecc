"""The disk deltas of miles and slime, applied to weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard

from deployments.policy.disk_delta import DeltaRefused, DiskDelta, write_patched
from tests.deployments.policy.policy_world import NORM, weights
from tests.deployments.policy.published_files import INDEX, publish_delta, tensor_bytes
from tests.deployments.policy.test_folder_follower import INITIAL_WEIGHTS as BASE
from tests.deployments.policy.test_folder_follower import same_tensors

FILE = "model-00000-of-00001.safetensors"


def patched(tmp_path: Path, base: bytes, *deltas: DiskDelta) -> bytes:
    (tmp_path / "base.safetensors").write_bytes(base)
    write_patched(tmp_path / "base.safetensors", deltas, tmp_path / "full.safetensors")
    return (tmp_path / "full.safetensors").read_bytes()


def refusal_of(tmp_path: Path, base: bytes, place: Path, version: int = 1) -> tuple[int, str, str]:
    with pytest.raises(DeltaRefused) as raised:
        patched(tmp_path, base, DiskDelta.read(version, version - 1, place))
    [problem] = raised.value.problems
    return raised.value.version, problem.field, problem.message


def test_a_chain_of_both_encodings_is_applied_in_one_pass(tmp_path: Path) -> None:
    first = publish_delta(tmp_path, 1, BASE, weights(2.0), "xor", "blake3")
    second = publish_delta(tmp_path, 2, weights(2.0), weights(3.0), "overwrite", "adler32")
    made = patched(tmp_path, BASE, DiskDelta.read(1, 0, first), DiskDelta.read(2, 1, second))
    assert same_tensors(made, weights(3.0))


def test_a_delta_without_changes_makes_the_same_weights(tmp_path: Path) -> None:
    assert patched(tmp_path, BASE, DiskDelta.read(1, 0, publish_delta(tmp_path, 1, BASE, BASE))) == BASE


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"base_version": "000004"}, "its index says that it makes version 1 of version 4, and not of 0"),
        ({"version": "000003"}, "its index says that it makes version 3 of version 0, and not of 0"),
        ({"delta_encoding": "add"}, "its encoding 'add' is not known; known are xor, overwrite"),
        ({"checksum_format": "crc32"}, "its checksum 'crc32' is not known; known are xxh3-128, blake3, adler32"),
        ({"compression_format": "lz4"}, "its compression 'lz4' is not known; known is zstd"),
        ({"version": "one"}, "the delta cannot be read: ValueError"),
    ],
)
def test_an_index_that_misfits_is_refused_with_what_it_says(tmp_path: Path, said: dict[str, str], message: str) -> None:
    assert refusal_of(tmp_path, BASE, publish_delta(tmp_path, 1, BASE, weights(2.0), said=said))[2].startswith(message)


def rewritten(place: Path, tensors: dict[str, Any], checksums: dict[str, str], listed: list[str] | None = None) -> None:
    (place / FILE).write_bytes(safetensors.numpy.save(tensors, checksums))
    index = json.loads((place / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(tensors if listed is None else listed, FILE)
    (place / INDEX).write_text(json.dumps(index))


def compressed(data: bytes) -> Any:
    return np.frombuffer(zstandard.ZstdCompressor().compress(data), np.uint8)


def norm_bytes() -> int:
    return tensor_bytes(BASE)[NORM].size


@pytest.mark.parametrize(
    ("encoding", "packed", "message"),
    [
        ("xor", compressed(b"short"), f"they are 5 bytes, and the tensor has {norm_bytes()}"),
        ("xor", compressed(bytes(norm_bytes() + 1)), f"they are more than {norm_bytes()} bytes"),
        ("xor", np.frombuffer(b"not zstd", np.uint8), ""),
        ("overwrite", compressed(b"\x02\0\0\0" + bytes(4) + b"x"), "they are 9 bytes, which is not the"),
        ("overwrite", compressed(b"\x01\0\0\0\xff\xff\0\0x"), "place 65535 lies behind the tensor's"),
        ("overwrite", compressed(b""), "they are 0 bytes"),
    ],
)
def test_changes_that_misfit_the_tensor_are_refused(tmp_path: Path, encoding: str, packed: Any, message: str) -> None:
    place = publish_delta(tmp_path, 1, BASE, weights(2.0), encoding)
    rewritten(place, {NORM: packed}, {NORM: "0"})
    assert refusal_of(tmp_path, BASE, place)[2].startswith(f"its changes are damaged: {message}")


def test_tensors_that_are_unknown_or_without_a_checksum_are_refused(tmp_path: Path) -> None:
    place = publish_delta(tmp_path, 1, BASE, weights(2.0))
    rewritten(place, {"other": compressed(b"x")}, {"other": "0"})
    assert refusal_of(tmp_path, BASE, place) == (1, "other", "the tensor is not known to the model")
    rewritten(place, {NORM: compressed(b"x"), "other": compressed(b"x")}, {NORM: "0", "other": "0"}, [NORM])
    assert refusal_of(tmp_path, BASE, place)[2].endswith("other is in one of them alone")
    rewritten(place, {NORM: compressed(b"x")}, {"elsewhere": "0"})
    assert refusal_of(tmp_path, BASE, place)[2] == f"it has no checksum of {NORM}"

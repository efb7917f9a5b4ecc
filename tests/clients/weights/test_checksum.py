"""The checksum over tensors: its exact definition, and what it does and does not depend on."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_client.weights.checksum import (
    Checksum,
    DigestedWeights,
    ThreadedChecksum,
    file_checksum,
    file_digest,
    weights_digest,
)
from rollout_client.weights.file_tensors import file_weights
from rollout_client.weights.safetensors_file import TensorEntry, Weights, header_of, read_header

TENSORS = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def test_a_checksum_is_that_of_sorted_lines() -> None:
    checksum = Checksum()
    checksum.add("b", "BF16", (1, 2), [b"12", b"34"])
    checksum.add("a", "F32", (), [b"5678"])
    lines = f"a F32 [] {hashlib.sha256(b'5678').hexdigest()}\nb BF16 [1,2] {hashlib.sha256(b'1234').hexdigest()}\n"
    assert checksum.hexdigest() == hashlib.sha256(lines.encode()).hexdigest()


def checksum_of(*tensors: tuple[str, bytes]) -> str:
    checksum = Checksum()
    for name, data in tensors:
        checksum.add(name, "U8", (len(data),), [data])
    return checksum.hexdigest()


def test_a_tensor_that_is_added_again_replaces_the_first() -> None:
    assert checksum_of(("a", b"1"), ("b", b"2"), ("a", b"3")) == checksum_of(("a", b"3"), ("b", b"2"))


def test_a_checksum_of_some_tensors_is_that_of_a_file_with_them_alone() -> None:
    checksum = Checksum()
    for name, data in (("a", b"1"), ("b", b"2"), ("c", b"3")):
        checksum.add(name, "U8", (1,), [data])
    assert checksum.hexdigest(["c", "a"]) == checksum_of(("a", b"1"), ("c", b"3"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "weights.safetensors", {"adapter_config": "{}"})
    return tmp_path / "weights.safetensors"


def test_the_digest_of_a_file_is_over_its_header_and_its_checksum(file: Path) -> None:
    header = file.read_bytes()[: read_header(file).data_begin]
    expected = hashlib.sha256(header + file_checksum(file).encode()).hexdigest()
    assert file_digest(file) == weights_digest(header, file_checksum(file)) == expected


def test_with_a_known_checksum_the_digest_needs_the_header_alone(file: Path) -> None:
    checksum, digest = file_checksum(file), file_digest(file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert file_digest(file, checksum) == digest != file_digest(file)


def test_each_byte_of_a_file_is_covered_by_its_digest(file: Path) -> None:
    content, digest = file.read_bytes(), file_digest(file)
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert file_digest(file) != digest, place
        except ValueError:
            # It is not a safetensors file any more.
            continue


def test_weights_are_digested_while_they_are_read(file: Path) -> None:
    digested = DigestedWeights(file_weights(file))
    content = b"".join(map(bytes, digested.blocks()))
    (file.parent / "sent").write_bytes(content)
    assert digested.digest == file_digest(file.parent / "sent")


def test_weights_whose_checksum_is_known_are_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: TensorEntry) -> Iterator[bytes]:
        yield b"12"

    monkeypatch.delattr(Checksum, "through")
    digested = DigestedWeights(Weights(header_of([("a", "U8", (2,))]), read, checksum="known"))
    header, data = map(bytes, digested.blocks())
    assert (data, digested.digest) == (b"12", weights_digest(header, "known"))


def test_a_checksum_that_is_computed_in_a_thread_is_the_same() -> None:
    tensors = {f"layer.{number}": bytes([number]) * 1000 for number in range(20)}
    plain = Checksum()
    with ThreadedChecksum() as threaded:
        for name, data in tensors.items():
            plain.add(name, "U8", (1000,), [data])
            threaded.add(name, "U8", (1000,), data)
        assert threaded.hexdigest() == plain.hexdigest()

"""The checksum over tensors: its exact definition, and what it does and does not depend on."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollout_client.weights.checksum import Checksum, ThreadedChecksum, file_checksum
from rollout_client.weights.safetensors_file import (
    read_header,
    read_tensor,
)

TENSORS = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def test_a_checksum_is_that_of_sorted_lines() -> None:
    checksum = Checksum()
    checksum.add("b", "BF16", (1, 2), [b"12", b"34"])
    checksum.add("a", "F32", (), [b"5678"])
    lines = f"a F32 [] {hashlib.sha256(b'5678').hexdigest()}\nb BF16 [1,2] {hashlib.sha256(b'1234').hexdigest()}\n"
    assert checksum.hexdigest() == hashlib.sha256(lines.encode()).hexdigest()


def test_a_checksum_is_the_same_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "theirs.safetensors"
    save_file(TENSORS, file)
    checksum = Checksum()
    for name in ("b", "a.weight"):
        header = read_header(file)
        entry = header.by_name[name]
        checksum.add(name, entry.dtype, entry.shape, [read_tensor(file, header, entry)])
    assert checksum.hexdigest() == file_checksum(file)


NAMED_DATA = st.dictionaries(st.text(max_size=3), st.binary(max_size=12), max_size=4)


def checksum_of(tensors: Iterable[tuple[str, bytes]], cut: int = 12) -> str:
    """Of tensors of bytes, whose data come in two blocks."""
    checksum = Checksum()
    for name, data in tensors:
        checksum.add(name, "U8", (len(data),), [data[:cut], data[cut:]])
    return checksum.hexdigest()


@given(NAMED_DATA, st.randoms(), st.integers(0, 12))
def test_a_checksum_depends_neither_on_the_order_of_the_tensors_nor_on_how_their_data_are_cut(
    tensors: dict[str, bytes], random: Random, cut: int
) -> None:
    shuffled = list(tensors.items())
    random.shuffle(shuffled)
    assert checksum_of(shuffled, cut) == checksum_of(tensors.items())


@given(NAMED_DATA, NAMED_DATA)
def test_checksums_are_equal_for_equal_tensors_only(first: dict[str, bytes], second: dict[str, bytes]) -> None:
    assert (checksum_of(first.items()) == checksum_of(second.items())) == (first == second)


@pytest.mark.parametrize(("dtype", "shape"), [("I8", (2, 1)), ("U8", (1, 2)), ("U8", (2,))])
def test_a_checksum_depends_on_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    checksum = Checksum()
    checksum.add("a", "U8", (2, 1), [b"ab"])
    other = Checksum()
    other.add("a", dtype, shape, [b"ab"])
    assert other.hexdigest() != checksum.hexdigest()


def test_a_tensor_that_is_added_again_replaces_the_first() -> None:
    assert checksum_of([("a", b"1"), ("b", b"2"), ("a", b"3")]) == checksum_of([("a", b"3"), ("b", b"2")])


def test_a_checksum_that_is_computed_in_a_thread_is_the_same() -> None:
    tensors = {f"layer.{number}": bytes([number]) * 1000 for number in range(20)}
    plain = Checksum()
    with ThreadedChecksum() as threaded:
        for name, data in tensors.items():
            plain.add(name, "U8", (1000,), [data])
            threaded.add(name, "U8", (1000,), data)
        assert threaded.hexdigest() == plain.hexdigest()


def test_a_tensor_that_cannot_be_hashed_is_an_error_of_the_caller() -> None:
    no_data: Any = "text"
    with ThreadedChecksum() as threaded:
        threaded.add("a", "U8", (1,), no_data)
        with pytest.raises(TypeError):
            threaded.hexdigest()

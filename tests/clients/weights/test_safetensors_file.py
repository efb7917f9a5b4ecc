"""Safetensors files: written and read bit for bit, and refused where they are broken."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollout_client.weights.model_tensors import DTYPES
from rollout_client.weights.safetensors_file import (
    NotSafetensors,
    TensorEntry,
    header_bytes,
    header_of,
    parse_header,
    read_header,
    read_tensor,
    tensor_blocks,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda name: name[0] != "_")
SPECS = st.lists(
    st.tuples(NAMES, st.sampled_from(["BF16", "F32", "U8", "I64"]), st.lists(st.integers(0, 4), max_size=3)),
    unique_by=lambda spec: spec[0],
    max_size=6,
)
TENSORS = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def written(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, path, metadata)
    return path


def raw_file(path: Path, said: object, data: bytes = b"") -> Path:
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(dtype: str = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_is_its_length_then_json_padded_to_eight_bytes() -> None:
    header = header_of([("b", "BF16", (2, 3)), ("a", "F32", ())], {"format": "pt"})
    text = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"a":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}'
    )
    assert header_bytes(header.entries, header.metadata) == (144).to_bytes(8, "little") + text.ljust(144)
    assert (header.data_begin, header.file_bytes) == (152, 168)


@given(SPECS, st.dictionaries(NAMES, NAMES, max_size=2))
def test_a_written_header_is_read_back(specs: list[tuple[str, str, list[int]]], metadata: dict[str, str]) -> None:
    header = header_of(specs, metadata)
    begun = header_bytes(header.entries, header.metadata)
    assert len(begun) % 8 == 0
    assert parse_header(begun[8:]) == header


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    header = header_of([("b", "BF16", (3,)), ("a.weight", "F32", (2, 3))], {"adapter_config": '{"r": 8}'})
    data = TENSORS["b"].view(torch.uint8).numpy().tobytes() + TENSORS["a.weight"].numpy().tobytes()
    file = tmp_path / "mine.safetensors"
    file.write_bytes(header_bytes(header.entries, header.metadata) + data)
    loaded = load_file(file)
    assert {name: value.tolist() for name, value in loaded.items()} == {k: v.tolist() for k, v in TENSORS.items()}
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"adapter_config": '{"r": 8}'}


def test_what_the_safetensors_library_wrote_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "theirs.safetensors", TENSORS, {"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    assert header.entries == (TensorEntry("a.weight", "F32", (2, 3), 0, 24), TensorEntry("b", "BF16", (3,), 24, 30))
    assert read_tensor(file, header, header.by_name["a.weight"]) == TENSORS["a.weight"].numpy().tobytes()
    assert list(tensor_blocks(file, header, header.by_name["b"], block_bytes=4)) == [b"\x80\x3f\x80\x3f", b"\x80\x3f"]


@pytest.mark.parametrize(
    "dtype", [*DTYPES.values(), torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64], ids=str
)
def test_each_dtype_of_the_safetensors_library_has_its_size(tmp_path: Path, dtype: torch.dtype) -> None:
    header = read_header(written(tmp_path / "theirs.safetensors", {"a": torch.zeros(3).to(dtype)}))
    assert header.by_name["a"].size_bytes == 3 * dtype.itemsize


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([("a", "F32", ()), ("a", "F32", ())], "cannot hold the name 'a' twice"),
        ([("__metadata__", "F32", ())], "cannot hold the name '__metadata__' at all"),
        ([("a", "complex", ())], "a: a safetensors file cannot hold the dtype 'complex'"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tensors: list[tuple[str, str, tuple[int, ...]]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        header_of(tensors)


@pytest.mark.parametrize(
    ("said", "data", "sentence"),
    [
        (b"[]", b"", "The header does not begin with {"),
        (b"{", b"", "The header is not JSON"),
        (b"{\xff}", b"", "The header is not JSON"),
        (b'{"a":' * 100_000, b"", "The header is not JSON"),
        (b'{"a": {}, "a": {}}', b"", "a name occurs twice"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ holds a value that is not text"),
        ({"__metadata__": None}, b"", "__metadata__ holds a value that is not text"),
        ({"a": None}, b"", "a has not just dtype, shape and data_offsets"),
        ({"a": tensor("Q8")}, b"ab", "a has the dtype 'Q8', which is not known"),
        ({"a": tensor(shape=(-2,))}, b"ab", "that are not sizes"),
        ({"a": tensor(shape=(True, 2))}, b"ab", "that are not sizes"),
        ({"a": tensor(shape=2)}, b"ab", "that are not sizes"),
        ({"a": tensor(offsets=(0,))}, b"ab", "that are not sizes"),
        ({"a": tensor(shape=(2**63,))}, b"ab", "that are not sizes"),
        ({"a": tensor(shape=(10**4000,) * 1200)}, b"ab", "that are not sizes"),
        ({"a" * 10_000: tensor(shape=(2**62,) * 64)}, b"ab", r"a\.\.\."),
        ({"\ud800": tensor()}, b"ab", "a name that is not text"),
        ({"__metadata__": {"adapter_config": "\udfff"}}, b"", "__metadata__ holds a value that is not text"),
        ({"a": tensor(offsets=(0, 1))}, b"a", "a has 1 bytes, which is not its shape"),
        ({"a": tensor(offsets=(2, 0))}, b"ab", "a has -2 bytes"),
        ({"a": tensor(offsets=(1, 3))}, b"abc", "The data of a begin at 1 where 0 is due"),
        ({"a": tensor(), "b": tensor(offsets=(1, 3))}, b"abc", "The data of b begin at 1 where 2 is due"),
        ({"a": tensor(), "b": tensor(offsets=(3, 5))}, b"abcde", "The data of b begin at 3 where 2 is due"),
        ({"a": tensor()}, b"a", "it is not whole"),
        ({"a": tensor()}, b"abc", "it is not whole"),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong(tmp_path: Path, said: object, data: bytes, sentence: str) -> None:
    file = raw_file(tmp_path / "broken.safetensors", said, data)
    with pytest.raises(NotSafetensors, match=sentence) as refused:
        read_header(file)
    assert str(file) in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"1234567", (9).to_bytes(8, "little") + b"{}", b"\xff" * 32])
def test_a_file_that_ends_within_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cut.safetensors").write_bytes(content)
    with pytest.raises(NotSafetensors, match="it ends within its header"):
        read_header(tmp_path / "cut.safetensors")


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "large.safetensors"
    file.write_bytes((100_000_001).to_bytes(8, "little"))
    with file.open("r+b") as sparse:
        sparse.truncate(100_000_009)
    with pytest.raises(NotSafetensors, match="has a header of 100000001 bytes; at most 100000000 may be"):
        read_header(file)


def test_a_pickle_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(pickle.dumps({"a": list(range(9))}))
    torch.save(TENSORS, tmp_path / "b.bin")
    for file in tmp_path.iterdir():
        with pytest.raises(NotSafetensors, match="is a pickle or an archive: save the weights as safetensors"):
            read_header(file)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    file = written(tmp_path / "a.safetensors", TENSORS)
    header = read_header(file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(NotSafetensors, match="ends within b: it was changed while it was read"):
        read_tensor(file, header, header.by_name["b"])

"""Deltas: what was encoded is applied bit for bit, and a delta that does not fit changes nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.weights.delta import (
    BadDelta,
    TensorChanges,
    apply_changes,
    as_bits,
    delta_entries,
    delta_weights,
    encode_changes,
)
from rollout_client.weights.safetensors_file import (
    Header,
    header_bytes,
    header_of,
)
from tests.clients.weights.applied_deltas import apply_delta


@st.composite
def bases_and_news(draw: st.DrawFn) -> tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    dtype, size = draw(st.sampled_from([("U8", 1), ("BF16", 2), ("F32", 4), ("F64", 8)]))
    base = draw(st.binary(max_size=40 * size).map(lambda data: data[: len(data) // size * size]))
    new = bytearray(base)
    for place in draw(st.lists(st.integers(0, max(len(new) - 1, 0)), max_size=5 if new else 0)):
        new[place] = draw(st.integers(0, 255))
    return dtype, as_bits(dtype, base), as_bits(dtype, bytes(new))


@given(bases_and_news(), st.integers(1, 50))
def test_what_was_encoded_is_applied_bit_for_bit(
    pair: tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]], max_gap: int
) -> None:
    _, base, new = pair
    changes = encode_changes(base, new, max_gap)
    assert changes.gaps.dtype == np.int32
    assert changes.gaps.max(initial=0) <= max_gap
    restored = base.copy()
    apply_changes("a", restored, changes)
    assert restored.tobytes() == new.tobytes()


def test_a_delta_holds_only_what_changed_nan_payloads_and_signs_of_zero_included() -> None:
    base = np.array([0x7FC0, 0x0000, 0x3F80, 0x4000], np.uint16)
    new = np.array([0x7FC1, 0x8000, 0x3F80, 0x4001], np.uint16)
    changes = encode_changes(base, new)
    assert (changes.gaps.tolist(), changes.values.tolist()) == ([0, 1, 2], [0x7FC1, 0x8000, 0x4001])
    assert changes.size_bytes == 3 * (4 + 2)


def test_a_gap_above_the_limit_is_split_by_values_that_replace_themselves() -> None:
    base = np.zeros(12, np.uint16)
    new = base.copy()
    new[11] = 7
    changes = encode_changes(base, new, max_gap=4)
    assert (changes.gaps.tolist(), changes.values.tolist()) == ([4, 4, 3], [0, 0, 7])


def test_each_gap_above_the_limit_is_split_counted_from_the_changed_value_before_it() -> None:
    base = np.arange(20, dtype=np.uint16)
    new = base.copy()
    new[[2, 7, 8, 17]] = 99
    changes = encode_changes(base, new, max_gap=4)
    assert changes.gaps.tolist() == [2, 4, 1, 1, 4, 4, 1]
    assert changes.values.tolist() == [99, 6, 99, 99, 12, 16, 99]


def test_a_gap_of_the_limit_is_not_split() -> None:
    base = np.zeros(9, np.uint16)
    new = base.copy()
    new[[4, 8]] = 1
    assert encode_changes(base, new, max_gap=4).gaps.tolist() == [4, 4]


@given(bases_and_news())
def test_only_changed_values_are_encoded(pair: tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    _, base, new = pair
    changes = encode_changes(base, new)
    changed = [index for index, (old, value) in enumerate(zip(base, new, strict=True)) if old != value]
    assert np.cumsum(changes.gaps).tolist() == changed
    assert changes.values.tolist() == [new[index] for index in changed]


@given(bases_and_news())
def test_a_delta_that_is_written_and_applied_to_its_base_gives_the_new_tensors(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]
) -> None:
    dtype, old, new = pair
    header = header_of([("a", dtype, old.shape), ("b", dtype, old.shape)])
    base, delta = (tmp_path_factory.getbasetemp() / name for name in ("base.safetensors", "delta.safetensors"))
    base.write_bytes(header_bytes(header.entries) + old.tobytes() + old.tobytes())
    changes = encode_changes(old, new)
    delta.write_bytes(b"".join(bytes(block) for block in delta_weights({"a": changes}, header).blocks()))
    assert [(entry.name, bytes(data)) for entry, data in apply_delta(base, delta)] == [
        ("a", new.tobytes()),
        ("b", old.tobytes()),
    ]


GAPS: Callable[..., np.ndarray[Any, Any]] = lambda *gaps: np.array(gaps, np.int32)  # noqa: E731
HALVES: Callable[..., np.ndarray[Any, Any]] = lambda *values: np.array(values, np.uint16)  # noqa: E731


@pytest.mark.parametrize(
    ("gaps", "values", "sentence"),
    [
        (GAPS([0, 1]), HALVES(1, 2), "gaps and values have 2 and 1 dimensions"),
        (np.array([0, 1], np.int64), HALVES(1, 2), "gaps are int64 and values uint16; int32 and uint16 must be"),
        (GAPS(0, 1), np.array([1, 2], np.uint32), "gaps are int32 and values uint32"),
        (GAPS(0, 1), HALVES(1), "there are 2 gaps and 1 values"),
        (GAPS(-1), HALVES(1), "a gap is too small"),
        (GAPS(0, 0), HALVES(1, 2), "a gap is too small"),
        (GAPS(4), HALVES(1), "place 4 is changed, and the tensor has only 4 values"),
        (GAPS(1, 2**31 - 1), HALVES(1, 2), "place 2147483648 is changed"),
    ],
)
def test_changes_that_do_not_fit_are_refused_and_change_nothing(gaps: Any, values: Any, sentence: str) -> None:
    base = HALVES(9, 9, 9, 9)
    with pytest.raises(BadDelta, match=f"^layer: .*{sentence}") as refused:
        apply_changes("layer", base, TensorChanges(gaps, values))
    assert refused.value.tensor == "layer"
    assert base.tolist() == [9, 9, 9, 9]


BASE = header_of([("a", "BF16", (4,)), ("b.values", "F32", (2,))]).by_name


@pytest.mark.parametrize(
    ("tensors", "tensor_name", "sentence"),
    [
        ([("a", "BF16", (1,))], "a", "only names that end in .gaps or .values"),
        ([("c.gaps", "I32", (1,)), ("c.values", "BF16", (1,))], "c", "the base has no such tensor"),
        ([("a.gaps", "I32", (1,))], "a", "a.values is missing"),
        ([("a.values", "BF16", (1,))], "a", "a.gaps is missing"),
        ([("a.gaps", "I64", (1,)), ("a.values", "BF16", (1,))], "a", "gaps are I64"),
        ([("a.gaps", "I32", (1,)), ("a.values", "F16", (1,))], "a", "values are F16 where the base has BF16"),
        ([("a.gaps", "I32", (1,)), ("a.values", "BF16", (2,))], "a", "both must be one"),
        ([("a.gaps", "I32", (1, 1)), ("a.values", "BF16", (1, 1))], "a", "both must be one"),
    ],
)
def test_a_delta_that_does_not_fit_its_base_is_refused_by_its_header(
    tensors: list[tuple[str, str, tuple[int, ...]]], tensor_name: str, sentence: str
) -> None:
    with pytest.raises(BadDelta, match=sentence) as refused:
        delta_entries(header_of(tensors), BASE)
    assert refused.value.tensor == tensor_name


def test_a_tensor_may_be_named_like_a_part_of_a_delta() -> None:
    delta: Header = header_of([("b.values.gaps", "I32", (1,)), ("b.values.values", "F32", (1,))])
    assert list(delta_entries(delta, BASE)) == ["b.values"]

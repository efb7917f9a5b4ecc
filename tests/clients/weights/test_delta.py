"""Deltas: what was encoded is applied bit for bit, and a delta that does not fit changes nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.weights.delta import BadDelta, TensorChanges, apply_changes, as_bits, delta_entries, encode_changes
from rollout_client.weights.safetensors_file import Header, header_of


@st.composite
def bases_and_news(draw: st.DrawFn) -> tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    dtype, size = draw(st.sampled_from([("U8", 1), ("BF16", 2), ("F32", 4), ("F64", 8)]))
    base = draw(st.binary(max_size=40 * size).map(lambda data: data[: len(data) // size * size]))
    new = bytearray(base)
    for place in draw(st.lists(st.integers(0, max(len(new) - 1, 0)), max_size=5 if new else 0)):
        new[place] = draw(st.integers(0, 255))
    return dtype, as_bits(dtype, base), as_bits(dtype, bytes(new))


@given(bases_and_news(), st.integers(1, 50))
def test_changes_apply_bit_for_bit(pair: tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]], max_gap: int) -> None:
    _, base, new = pair
    changes = encode_changes(base, new, max_gap)
    assert changes.gaps.dtype == np.int32
    assert changes.gaps.max(initial=0) <= max_gap
    restored = base.copy()
    apply_changes("a", restored, changes)
    assert restored.tobytes() == new.tobytes()


def test_a_delta_holds_the_changes_with_nan_payloads_and_signs_of_zero() -> None:
    base = np.array([0x7FC0, 0x0000, 0x3F80, 0x4000], np.uint16)
    changes = encode_changes(base, np.array([0x7FC1, 0x8000, 0x3F80, 0x4001], np.uint16))
    assert (changes.gaps.tolist(), changes.values.tolist()) == ([0, 1, 2], [0x7FC1, 0x8000, 0x4001])
    assert changes.size_bytes == 3 * (4 + 2)


@pytest.mark.parametrize(
    ("gaps", "values", "sentence"),
    [
        ([-1], [1], "a gap is too small"),
        ([0, 0], [1, 2], "a gap is too small"),
        ([4], [1], "place 4 is changed, and the tensor has only 4 values"),
        ([1, 2**31 - 1], [1, 2], "place 2147483648 is changed"),
    ],
)
def test_changes_that_do_not_fit_are_refused_and_change_nothing(gaps: Any, values: Any, sentence: str) -> None:
    base = np.array([9, 9, 9, 9], np.uint16)
    with pytest.raises(BadDelta, match=f"^layer: .*{sentence}") as refused:
        apply_changes("layer", base, TensorChanges(np.array(gaps, np.int32), np.array(values, np.uint16)))
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

"""Weights that may not be served: everything that can be wrong with full weights, adapters and deltas."""

import pickle
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from deployments.policy.assembly import write_adapter
from deployments.policy.weight_checks import (
    largest_upload_bytes,
    layout_of,
    validate_adapter,
    validate_delta,
    validate_full,
    validate_partial,
)
from rollout_client.contract.policy import PolicyLayout, TensorLayout
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import MAX_HEADER_BYTES
from tests.deployments.policy.weight_files import GOOD, LAYOUT, Bomb, Tensors, adapter, delta_of, raw, refusal, written
from tests.paths import TINY_MODEL


def test_the_layout_of_a_checkpoint_is_the_one_that_its_weights_pass(tmp_path: Path) -> None:
    written(tmp_path / "model" / "model-1.safetensors", {"norm.weight": GOOD["norm.weight"], "scale": GOOD["scale"]})
    written(tmp_path / "model" / "model-2.safetensors", {"embed.weight": GOOD["embed.weight"]})
    assert layout_of(tmp_path / "model") == LAYOUT
    tiny = TINY_MODEL / "model.safetensors"
    assert validate_full(tiny, layout_of(TINY_MODEL)) == file_checksum(tiny)


NOT_FINITE = "it holds NaN or infinity; the training has diverged"


def different(found: str, expected: str) -> str:
    return f"the tensor is {found}; the model has {expected}"


def model_but(**changed: torch.Tensor | None) -> bytes:
    """The good weights with other tensors."""
    return save({name: tensor for name, tensor in {**GOOD, **changed}.items() if tensor is not None})


NORM = "norm.weight"
OTHER_MODEL = [
    (model_but(lm_head=torch.ones(1)), [("lm_head", "the tensor is not known to the model")]),
    (model_but(**{NORM: torch.ones(3, 1).bfloat16()}), [(NORM, different("BF16 [3, 1]", "BF16 [3]"))]),
    (model_but(**{NORM: torch.ones(3).half()}), [(NORM, different("F16 [3]", "BF16 [3]"))]),
    (
        model_but(**{"norm.weight": torch.ones(4), "scale": torch.ones(1)}),
        [("norm.weight", different("F32 [4]", "BF16 [3]")), ("scale", different("F32 [1]", "F32 []"))],
    ),
    (
        model_but(**{"norm.weight": None, "other": torch.ones(1), "scale": torch.ones(())[None]}),
        [
            ("norm.weight", "the tensor is missing; the model has BF16 [3]"),
            ("other", "the tensor is not known to the model"),
            ("scale", different("F32 [1]", "F32 []")),
        ],
    ),
]


def test_an_upload_may_be_as_large_as_a_delta_that_changes_every_value() -> None:
    values_and_gaps = 12 * (2 + 4) + 3 * (2 + 4) + 1 * (4 + 4)
    assert largest_upload_bytes(LAYOUT) == MAX_HEADER_BYTES + values_and_gaps


def test_whole_weights_have_all_tensors_of_the_model_that_drafts_or_none_and_partial_ones_none(tmp_path: Path) -> None:
    norm = LAYOUT.tensors[NORM]
    layout = LAYOUT.model_copy(update={"draft": {"draft.a": norm, "draft.b": norm}})
    drafts = {f"draft.{name}": torch.ones(3).bfloat16() for name in "ab"}
    for place, tensors in enumerate([GOOD, {**GOOD, **drafts}]):
        file = written(tmp_path / f"{place}", tensors)
        assert validate_full(file, layout) == file_checksum(file)
    half = written(tmp_path / "half", {**GOOD, "draft.a": drafts["draft.a"]})
    assert refusal(validate_full, half, layout) == [("draft.b", "the tensor is missing; the model has BF16 [3]")]
    alone = written(tmp_path / "alone", drafts)
    unknown = [(name, "the tensor is not known to the model") for name in drafts]
    assert refusal(validate_partial, alone, layout) == unknown
    assert largest_upload_bytes(layout) == largest_upload_bytes(LAYOUT) + 2 * 3 * (2 + 4)


def test_many_different_tensors_are_named_up_to_a_number(tmp_path: Path) -> None:
    names = [f"layer.{number}" for number in range(9)]
    layout = PolicyLayout(tensors={name: TensorLayout(dtype="BF16", shape=[1]) for name in names})
    file = written(tmp_path / "a", {name: torch.ones(1) for name in names})
    assert refusal(validate_full, file, layout) == [(name, different("F32 [1]", "BF16 [1]")) for name in names[:5]]
    assert refusal(validate_full, written(tmp_path / "b", {"x": torch.ones(1)}), layout)[:6] == [
        *((name, "the tensor is missing; the model has BF16 [1]") for name in names[:5]),
        ("x", "the tensor is not known to the model"),
    ]


BYTES = st.binary(min_size=1, max_size=1)
FLOATS = {
    "BF16": (torch.bfloat16, st.floats(width=32).map(lambda value: struct.pack("<f", value)[2:])),
    "F16": (torch.float16, st.floats(width=16).map(lambda value: struct.pack("<e", value))),
    "F32": (torch.float32, st.floats(width=32).map(lambda value: struct.pack("<f", value))),
    "F64": (torch.float64, st.floats().map(lambda value: struct.pack("<d", value))),
    "C64": (torch.complex64, st.tuples(*[st.floats(width=32)] * 2).map(lambda parts: struct.pack("<ff", *parts))),
    "F8_E5M2": (torch.float8_e5m2, BYTES),
    "F8_E4M3": (torch.float8_e4m3fn, BYTES),
    "F8_E8M0": (torch.float8_e8m0fnu, BYTES),
    "U8": (torch.uint8, BYTES),
    "I32": (torch.int32, st.binary(min_size=4, max_size=4)),
}


@pytest.mark.parametrize("name", FLOATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_every_value_is_judged_as_torch_judges_it(tmp_path: Path, name: str, data: st.DataObject) -> None:
    dtype, values = FLOATS[name]
    file = raw(tmp_path / "a", name, value := data.draw(values))
    layout = PolicyLayout(tensors={"w": TensorLayout(dtype=name, shape=[3])})
    given = torch.frombuffer(bytearray(value), dtype=dtype)
    if (given if given.is_complex() else given.double()).isfinite().item():
        assert validate_full(file, layout) == file_checksum(file)
    else:
        assert refusal(validate_full, file, layout) == [("w", NOT_FINITE)]


def test_a_value_far_into_a_large_tensor_is_seen(tmp_path: Path) -> None:
    values = 5 * 2**20
    file = raw(tmp_path / "a", "BF16", b"\x80\x7f", values=values)
    layout = PolicyLayout(tensors={"w": TensorLayout(dtype="BF16", shape=[values])})
    assert refusal(validate_full, file, layout) == [("w", NOT_FINITE)]


def saved_by_torch() -> bytes:
    torch.save(GOOD, file := BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    ("config", "limit", "problem"),
    [
        ('{"r": 8}', 8, None),
        ('{"r": 8}', None, None),
        ('{"r": 8, "rank_pattern": {"q_proj": 16}}', 8, "its rank is 16, and the engines take at most 8: raise"),
        ('{"r": 32}', 8, "its rank is 32, and the engines take at most 8: raise max_lora_rank under engine"),
        ('{"r": 1}', 0, "the engines take no adapters: set enable_lora: true under engine in the service's config"),
    ],
)
def test_an_adapter_of_a_higher_rank_than_the_engines_take_is_refused(
    tmp_path: Path, config: str, limit: int | None, problem: str | None
) -> None:
    write_adapter(adapter(tmp_path / "adapter", config), tmp_path / "packed")
    layout = LAYOUT.model_copy(update={"max_lora_rank": limit})
    if problem is None:
        validate_adapter(tmp_path / "packed", layout)
    else:
        [(field, message)] = refusal(validate_adapter, tmp_path / "packed", layout)
        assert (field, message[: len(problem)]) == ("adapter_config", problem)


def changes(name: str, gaps: list[int], values: list[float], dtype: torch.dtype = torch.int32) -> Tensors:
    return {f"{name}.gaps": torch.tensor(gaps, dtype=dtype), f"{name}.values": torch.tensor(values)}


NO_CONFIG = "the file's metadata hold no adapter_config, the text of PEFT's adapter_config.json"
SMALL_GAP = "a gap is too small: the first must be at least 0, the others at least 1"
CUT_OFF = "what arrived is not a safetensors file, or was cut off: it ends within its header"
PICKLE = "what arrived is a pickle or an archive: save the weights as safetensors"
NO_FILES = [
    (save(GOOD)[:-1], "what arrived has 233 bytes, its header says 234: it is not whole"),
    (save(GOOD) + b"\0", "what arrived has 235 bytes, its header says 234: it is not whole"),
    *((content, CUT_OFF) for content in (save(GOOD)[:100], b"", b"<!DOCTYPE html>" * 9)),
    *((content, PICKLE) for content in (pickle.dumps(Bomb()), saved_by_torch())),
    (b"\x02" + bytes(7) + b"[]", "what arrived: The header does not begin with {"),
]
NO_ADAPTERS = [
    *(
        (save({"a": torch.ones(1)}, metadata), "weights", NO_CONFIG)
        for metadata in (None, {"adapter_config": "{"}, {"adapter_config": "[]"})
    ),
    (save({}, {"adapter_config": "{}"}), "weights", "the adapter holds no tensor"),
    (
        save(
            {"embed.lora_A.weight": torch.tensor([[0.0, 1.0, torch.nan]]), "embed.lora_B.weight": torch.ones(4, 1)},
            {"adapter_config": "{}"},
        ),
        "embed.lora_A.weight",
        NOT_FINITE,
    ),
]
NO_CHANGES = [
    ({"norm.weight": torch.ones(3)}, "norm.weight", "a delta holds only names that end in .gaps or .values"),
    (changes("lm_head", [0], [1.0]), "lm_head", "the base has no such tensor"),
    ({"scale.gaps": torch.zeros(1, dtype=torch.int32)}, "scale", "scale.values is missing"),
    (changes("scale", [0], [1.0], torch.int64), "scale", "gaps are I64; they must be I32"),
    (changes("norm.weight", [0], [1.0]), "norm.weight", "values are F32 where the base has BF16"),
    (changes("scale", [1], [1.0]), "scale", "place 1 is changed, and the tensor has only 1 values"),
    (changes("scale", [-1], [1.0]), "scale", SMALL_GAP),
    (changes("scale", [0, 0], [1.0, 2.0]), "scale", SMALL_GAP),
    (changes("scale", [0], [torch.nan]), "scale", NOT_FINITE),
]
REFUSED: list[tuple[Callable[..., Any], bytes, list[tuple[str, str]]]] = [
    *((validate_full, content, found) for content, found in OTHER_MODEL),
    *((validate_full, content, [("weights", message)]) for content, message in NO_FILES),
    *((validate_adapter, content, [(field, message)]) for content, field, message in NO_ADAPTERS),
    *((validate_delta, save(tensors), [(field, message)]) for tensors, field, message in NO_CHANGES),
    (validate_partial, save({"scale": torch.ones(1)}), [("scale", different("F32 [1]", "F32 []"))]),
]


@pytest.mark.parametrize(("validate", "content", "found"), REFUSED)
def test_a_file_that_may_not_be_served_is_refused_with_all_that_is_wrong(
    tmp_path: Path, validate: Callable[..., Any], content: bytes, found: list[tuple[str, str]]
) -> None:
    (tmp_path / "a").write_bytes(content)
    assert refusal(validate, tmp_path / "a", LAYOUT) == found


def test_a_delta_has_the_checksum_of_its_own_tensors(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    new = written(tmp_path / "new", {**GOOD, "scale": torch.tensor(7.0), "norm.weight": GOOD["norm.weight"] * 3})
    for delta in (delta_of(base, new, tmp_path / "delta"), written(tmp_path / "nothing", {})):
        assert validate_delta(delta, LAYOUT) == file_checksum(delta)

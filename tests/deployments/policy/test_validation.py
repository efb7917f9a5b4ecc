"""What arrived and may not be served: all that can be wrong with weights, a delta, or the place to read them from."""

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from deployments.policy.assembly import sha256_of, unpack_zstd, write_adapter, write_applied, write_checkpoint
from deployments.policy.checkpoint_fetch import fetch_checkpoint
from deployments.policy.failures import PolicyFailure, SourceRefused, WeightsRefused
from deployments.policy.validation import layout_of, validate_adapter, validate_full
from rollout_client.policy_contract import PolicyLayout, TensorLayout
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.delta import as_bits, delta_weights, encode_changes
from rollout_client.weights.safetensors_file import header_bytes, header_of, read_header, read_tensor
from tests.paths import TINY_MODEL

Tensors = dict[str, torch.Tensor]
GOOD: Tensors = {
    "embed.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "scale": torch.tensor(2.0),
}
LAYOUT = PolicyLayout(
    tensors={
        "embed.weight": TensorLayout(dtype="BF16", shape=[4, 3]),
        "norm.weight": TensorLayout(dtype="BF16", shape=[3]),
        "scale": TensorLayout(dtype="F32", shape=[]),
    }
)


def written(path: Path, tensors: Tensors) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def raw(path: Path, dtype: str, value: bytes, name: str = "w", values: int = 3) -> Path:
    """A file with one tensor of zeros, but for its last value."""
    header = header_of([(name, dtype, (values,))])
    path.write_bytes(header_bytes(header.entries) + bytes(len(value) * (values - 1)) + value)
    return path


def findings(failure: PolicyFailure) -> list[tuple[str, str]]:
    return [(problem.field, problem.message) for problem in failure.problems]


def refusal(call: Callable[..., Any], *arguments: Any) -> list[tuple[str, str]]:
    with pytest.raises(WeightsRefused) as refused:
        call(*arguments)
    return findings(refused.value)


# Full weights


def test_good_weights_have_the_checksum_that_the_client_computes(tmp_path: Path) -> None:
    file = written(tmp_path / "a", GOOD)
    assert validate_full(file, LAYOUT) == file_checksum(file)


def test_the_order_in_the_file_does_not_matter(tmp_path: Path) -> None:
    specs = [(name, layout.dtype, layout.shape) for name, layout in LAYOUT.tensors.items()]
    checksums = set()
    for number, order in enumerate((specs, specs[::-1])):
        file = tmp_path / str(number)
        file.write_bytes(header_bytes(header_of(order).entries) + bytes(12 * 2 + 3 * 2 + 4))
        checksums.add(validate_full(file, LAYOUT))
    assert len(checksums) == 1


def test_the_layout_of_a_checkpoint_is_the_one_that_its_weights_pass(tmp_path: Path) -> None:
    written(tmp_path / "model" / "model-1.safetensors", {"norm.weight": GOOD["norm.weight"], "scale": GOOD["scale"]})
    written(tmp_path / "model" / "model-2.safetensors", {"embed.weight": GOOD["embed.weight"]})
    assert layout_of(tmp_path / "model") == LAYOUT
    assert validate_full(TINY_MODEL / "model.safetensors", layout_of(TINY_MODEL)) == file_checksum(
        TINY_MODEL / "model.safetensors"
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"norm.weight": None}, [("norm.weight", "the tensor is missing")]),
        (
            {"norm.weight": None, "scale": None},
            [(name, "the tensor is missing, like 1 more") for name in ("norm.weight", "scale")],
        ),
        ({"lm_head": torch.ones(1)}, [("lm_head", "the tensor is not known to the model")]),
        ({"norm.weight": torch.ones(4).bfloat16()}, [("norm.weight", "its shape is [4]; the model's is [3]")]),
        ({"norm.weight": torch.ones(3, 1).bfloat16()}, [("norm.weight", "its shape is [3, 1]; the model's is [3]")]),
        ({"norm.weight": torch.ones(3).half()}, [("norm.weight", "its dtype is F16; the model's is BF16")]),
        (
            {"norm.weight": torch.ones(4), "scale": torch.ones(1)},
            [
                ("norm.weight", "its shape is [4]; the model's is [3]; its dtype is F32; the model's is BF16"),
                ("scale", "its shape is [1]; the model's is []"),
            ],
        ),
        (
            {"norm.weight": None, "other": torch.ones(1), "scale": torch.ones(())[None]},
            [
                ("norm.weight", "the tensor is missing"),
                ("other", "the tensor is not known to the model"),
                ("scale", "its shape is [1]; the model's is []"),
            ],
        ),
    ],
)
def test_weights_of_another_model_are_refused_tensor_by_tensor(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], expected: list[tuple[str, str]]
) -> None:
    tensors = {name: tensor for name, tensor in {**GOOD, **changed}.items() if tensor is not None}
    assert refusal(validate_full, written(tmp_path / "a", tensors), LAYOUT) == expected


def test_many_different_tensors_are_named_up_to_a_number(tmp_path: Path) -> None:
    names = [f"layer.{number}" for number in range(9)]
    layout = PolicyLayout(tensors={name: TensorLayout(dtype="BF16", shape=[1]) for name in names})
    file = written(tmp_path / "a", {name: torch.ones(1) for name in names})
    assert refusal(validate_full, file, layout) == [
        *((name, "its dtype is F32; the model's is BF16") for name in names[:5]),
        ("weights", "4 more tensors are different"),
    ]
    missing = written(tmp_path / "b", {"x": torch.ones(1)})
    assert refusal(validate_full, missing, layout)[:6] == [
        *((name, "the tensor is missing, like 8 more") for name in names[:5]),
        ("x", "the tensor is not known to the model"),
    ]


FINITE_EXTREMES = {
    "BF16": [b"\x7f\x7f", b"\x7f\xff", b"\x01\x00", b"\x00\x80"],
    "F16": [b"\xff\x7b", b"\xff\xfb", b"\x01\x00", b"\x00\x80"],
    "F32": [struct.pack("<f", value) for value in (3.4028234663852886e38, -3.4028234663852886e38, 1e-45, -0.0)],
    "F64": [struct.pack("<d", value) for value in (1.7976931348623157e308, -1.7976931348623157e308, 5e-324, -0.0)],
    "C64": [struct.pack("<ff", 3.4028234663852886e38, -1.0)],
    "F8_E5M2": [b"\x7b", b"\xfb", b"\x01", b"\x80"],
    "F8_E4M3": [b"\x7e", b"\xfe", b"\x01", b"\x80"],
    "F8_E8M0": [b"\xfe", b"\x7f"],
    "I32": [b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f"],
    "U8": [b"\xff", b"\x7f"],
}
NON_FINITE = {
    "BF16": [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x81\xff"],
    "F16": [b"\x00\x7c", b"\x00\xfc", b"\x00\x7e", b"\x01\xfc"],
    "F32": [struct.pack("<f", float(value)) for value in ("inf", "-inf", "nan")] + [b"\x01\x00\x80\xff"],
    "F64": [struct.pack("<d", float(value)) for value in ("inf", "-inf", "nan")] + [b"\x01" + bytes(5) + b"\xf0\xff"],
    "C64": [struct.pack("<ff", 0.0, float("nan")), struct.pack("<ff", float("-inf"), 0.0)],
    "F8_E5M2": [b"\x7c", b"\xfc", b"\x7d", b"\xff"],
    "F8_E4M3": [b"\x7f", b"\xff"],
    "F8_E8M0": [b"\xff"],
}


def of_dtype(dtype: str) -> PolicyLayout:
    return PolicyLayout(tensors={"w": TensorLayout(dtype=dtype, shape=[3])})


@pytest.mark.parametrize("dtype", FINITE_EXTREMES)
def test_finite_extremes_pass(tmp_path: Path, dtype: str) -> None:
    for value in FINITE_EXTREMES[dtype]:
        file = raw(tmp_path / "a", dtype, value)
        assert validate_full(file, of_dtype(dtype)) == file_checksum(file)


@pytest.mark.parametrize("dtype", NON_FINITE)
def test_nan_and_infinity_are_refused_with_the_tensor_that_holds_them(tmp_path: Path, dtype: str) -> None:
    for value in NON_FINITE[dtype]:
        file = raw(tmp_path / "a", dtype, value)
        expected = [("w", "it holds NaN or infinity; the training has diverged")]
        assert refusal(validate_full, file, of_dtype(dtype)) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=2, max_size=2))
def test_every_half_is_judged_as_torch_judges_it(tmp_path: Path, value: bytes) -> None:
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        file = raw(tmp_path / "a", name, value, values=1)
        layout = PolicyLayout(tensors={"w": TensorLayout(dtype=name, shape=[1])})
        if torch.frombuffer(bytearray(value), dtype=dtype).isfinite().item():
            validate_full(file, layout)
        else:
            refusal(validate_full, file, layout)


def test_a_value_far_into_a_large_tensor_is_seen(tmp_path: Path) -> None:
    values = 5 * 2**20
    file = raw(tmp_path / "a", "BF16", b"\x80\x7f", values=values)
    layout = PolicyLayout(tensors={"w": TensorLayout(dtype="BF16", shape=[values])})
    assert refusal(validate_full, file, layout) == [("w", "it holds NaN or infinity; the training has diverged")]


class Bomb:
    """Raises where a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('the pickle was read')",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (save(GOOD)[:-1], "what arrived has 233 bytes, its header says 234: it is not whole"),
        (save(GOOD)[:100], "what arrived is no safetensors file, or was cut off: it ends within its header"),
        (save(GOOD) + b"\0", "what arrived has 235 bytes, its header says 234: it is not whole"),
        (b"", "what arrived is no safetensors file, or was cut off: it ends within its header"),
        (pickle.dumps(Bomb()), "what arrived is a pickle or an archive: save the weights as safetensors"),
        (b"<!DOCTYPE html>" * 9, "what arrived is no safetensors file, or was cut off: it ends within its header"),
        (b"\x02" + bytes(7) + b"[]", "what arrived: The header does not begin with {"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    assert refusal(validate_full, tmp_path / "a", LAYOUT) == [("weights", message)]


def test_a_checkpoint_of_torch_is_refused_as_a_pickle(tmp_path: Path) -> None:
    torch.save(GOOD, tmp_path / "a")
    message = "what arrived is a pickle or an archive: save the weights as safetensors"
    assert refusal(validate_full, tmp_path / "a", LAYOUT) == [("weights", message)]


# Adapters


def adapter(folder: Path, config: str = '{"r": 8}') -> Path:
    written(folder / "adapter_model.safetensors", {"lora_A": torch.ones(2), "lora_B": torch.zeros(2)})
    (folder / "adapter_config.json").write_text(config)
    return folder


def test_an_adapter_of_peft_is_packed_and_checked(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", '{"r": 8,  "lora_alpha": 16}')
    write_adapter(folder, tmp_path / "packed")
    checksum = file_checksum(folder / "adapter_model.safetensors")
    assert validate_adapter(tmp_path / "packed") == (checksum, '{"r": 8,  "lora_alpha": 16}')


NO_CONFIG = "the file's metadata hold no adapter_config, the text of PEFT's adapter_config.json"


@pytest.mark.parametrize(
    ("tensors", "metadata", "finding"),
    [
        ({"a": torch.ones(1)}, None, ("weights", NO_CONFIG)),
        ({"a": torch.ones(1)}, {"adapter_config": "{"}, ("weights", NO_CONFIG)),
        ({"a": torch.ones(1)}, {"adapter_config": "[]"}, ("weights", NO_CONFIG)),
        ({}, {"adapter_config": "{}"}, ("weights", "the adapter holds no tensor")),
        (
            {"a": torch.tensor([0.0, float("nan")])},
            {"adapter_config": "{}"},
            ("a", "it holds NaN or infinity; the training has diverged"),
        ),
    ],
)
def test_what_is_no_adapter_is_refused(
    tmp_path: Path, tensors: Tensors, metadata: dict[str, str] | None, finding: tuple[str, str]
) -> None:
    save_file(tensors, tmp_path / "a", metadata)
    assert refusal(validate_adapter, tmp_path / "a") == [finding]


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path} holds no adapter_model.safetensors: save the adapter with save_pretrained of PEFT"
    assert refusal(write_adapter, tmp_path, tmp_path / "packed") == [("weights", message)]
    adapter(tmp_path, "{")
    [(field, said)] = refusal(write_adapter, tmp_path, tmp_path / "packed")
    assert (field, said.startswith(f"{tmp_path / 'adapter_config.json'} is no JSON: ")) == ("weights", True)


# Deltas


def delta_of(base: Path, new: Path, delta: Path) -> Path:
    """As a client makes it."""
    base_header, new_header = read_header(base), read_header(new)
    changes = {
        entry.name: encode_changes(
            as_bits(entry.dtype, read_tensor(base, base_header, entry)),
            as_bits(entry.dtype, read_tensor(new, new_header, new_header.by_name[entry.name])),
        )
        for entry in base_header.entries
    }
    delta.write_bytes(b"".join(bytes(block) for block in delta_weights(changes, base_header).blocks()))
    return delta


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.binary(min_size=24, max_size=24), st.binary(min_size=24, max_size=24))
def test_a_delta_gives_the_new_weights_bit_for_bit(tmp_path: Path, old: bytes, new: bytes) -> None:
    specs = [("a", "F32", (3,)), ("b", "BF16", (2, 3))]
    start = header_bytes(header_of(specs).entries)
    files = {"base": start + old, "new": start + new}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    delta = delta_of(tmp_path / "base", tmp_path / "new", tmp_path / "delta")
    write_applied(tmp_path / "base", delta, tmp_path / "full")
    assert (tmp_path / "full").read_bytes() == files["new"]


def test_a_delta_of_nothing_gives_the_base(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    delta = written(tmp_path / "delta", {})
    write_applied(base, delta, tmp_path / "full")
    assert validate_full(tmp_path / "full", LAYOUT) == file_checksum(base)


@pytest.mark.parametrize(
    ("parts", "finding"),
    [
        ({"norm.weight": torch.ones(3)}, ("norm.weight", "a delta holds only names that end in .gaps or .values")),
        (
            {"lm_head.gaps": torch.zeros(1, dtype=torch.int32), "lm_head.values": torch.ones(1)},
            ("lm_head", "the base has no such tensor"),
        ),
        ({"scale.gaps": torch.zeros(1, dtype=torch.int32)}, ("scale", "scale.values is missing")),
        (
            {"scale.gaps": torch.zeros(1, dtype=torch.int64), "scale.values": torch.ones(1)},
            ("scale", "gaps are I64; they must be I32"),
        ),
        (
            {"scale.gaps": torch.ones(1, dtype=torch.int32), "scale.values": torch.ones(1)},
            ("scale", "place 1 is changed, and the tensor has only 1 values"),
        ),
        (
            {"scale.gaps": torch.tensor([-1], dtype=torch.int32), "scale.values": torch.ones(1)},
            ("scale", "a gap is too small: the first must be at least 0, the others at least 1"),
        ),
    ],
)
def test_a_delta_that_does_not_fit_its_base_is_refused(
    tmp_path: Path, parts: Tensors, finding: tuple[str, str]
) -> None:
    base = written(tmp_path / "base", GOOD)
    delta = written(tmp_path / "delta", parts)
    assert refusal(write_applied, base, delta, tmp_path / "full") == [finding]


def test_a_delta_that_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    (tmp_path / "delta").write_bytes(b"")
    message = "the delta is no safetensors file, or was cut off: it ends within its header"
    assert refusal(write_applied, base, tmp_path / "delta", tmp_path / "full") == [("weights", message)]


def test_a_base_that_was_removed_meanwhile_asks_for_full_weights(tmp_path: Path) -> None:
    delta = written(tmp_path / "delta", {})
    message = "newer versions have taken the place of the base; send full weights"
    assert refusal(write_applied, tmp_path / "base", delta, tmp_path / "full") == [("base", message)]


def test_a_delta_may_make_weights_that_are_refused_afterwards(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    new = written(tmp_path / "new", {**GOOD, "scale": torch.tensor(float("inf"))})
    write_applied(base, delta_of(base, new, tmp_path / "delta"), tmp_path / "full")
    assert refusal(validate_full, tmp_path / "full", LAYOUT)[0][0] == "scale"


# Compression


@pytest.mark.parametrize("frames", [1, 3])
def test_what_was_packed_is_unpacked(tmp_path: Path, frames: int) -> None:
    content = np.random.default_rng(0).bytes(100_000)
    parts = [
        content[len(content) * number // frames : len(content) * (number + 1) // frames] for number in range(frames)
    ]
    (tmp_path / "packed").write_bytes(b"".join(zstandard.compress(part) for part in parts))
    unpack_zstd(tmp_path / "packed", tmp_path / "a", len(content))
    assert (tmp_path / "a").read_bytes() == content


def test_a_small_stream_that_unpacks_to_a_large_file_is_refused_before_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(zstandard.compress(bytes(2**26)))
    [(field, message)] = refusal(unpack_zstd, tmp_path / "packed", tmp_path / "a", 2**20)
    assert (field, "more than 1048576 bytes" in message) == ("weights", True)
    assert (tmp_path / "a").stat().st_size <= 2**20


def test_what_is_not_packed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(save(GOOD))
    [(field, message)] = refusal(unpack_zstd, tmp_path / "packed", tmp_path / "a", 2**30)
    assert (field, "the bytes are no zstd stream, as Content-Encoding says" in message) == ("weights", True)


@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_stream_that_was_cut_off_is_refused_at_last(tmp_path: Path, kept: int) -> None:
    (tmp_path / "packed").write_bytes(zstandard.compress(save(GOOD))[:kept])

    def unpacked_and_checked() -> None:
        unpack_zstd(tmp_path / "packed", tmp_path / "a", 2**30)
        validate_full(tmp_path / "a", LAYOUT)

    assert refusal(unpacked_and_checked)[0][0] == "weights"


def test_a_digest_is_that_of_the_files_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# Checkpoints that the service reads


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    folder = tmp_path / "roots"
    written(folder / "step-1" / "model.safetensors", GOOD)
    return folder


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
    allowed = f"/elsewhere, {roots}"
    message = source_refusal(place, ["/elsewhere", str(roots)], tmp_path)
    assert message == f"it lies outside the roots that weights may be read from ({allowed})"


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
        ("{roots}/none", "it cannot be read: FileNotFoundError: "),
        ("{roots}/a\0b", "it cannot be read: ValueError: "),
        ("{roots}/circle", "it cannot be read: "),
        ("memory://roots/none", "it cannot be read: FileNotFoundError: memory://roots/none"),
        ("memory://[roots", "it cannot be read: ValueError: "),
        ("unheard-of://roots/a", "it cannot be read: ValueError: "),
        ("memory://roots/%2e%2e/a", "it cannot be read: ValueError: "),
    ],
)
def test_a_place_that_cannot_be_read_is_refused(roots: Path, tmp_path: Path, location: str, says: str) -> None:
    (roots / "circle").symlink_to("circle")
    place = location.format(roots=roots)
    assert source_refusal(place, [str(roots), "memory://roots", "unheard-of://roots"], tmp_path).startswith(says)


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
    expected = "it lies outside the roots that weights may be read from (memory://roots/inner)"
    assert source_refusal(location, ["memory://roots/inner"], tmp_path) == expected


def test_a_folder_of_pickles_behind_a_url_is_refused(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/roots/step-1/pytorch_model.bin", pickle.dumps(Bomb()))
    location = "memory://roots/step-1"
    assert source_refusal(location, ["memory://roots"], tmp_path) == (
        "it cannot be read: FileNotFoundError: memory://roots/step-1"
    )


# Checkpoints as one file


def test_a_sharded_checkpoint_becomes_one_file_that_transformers_reads(roots: Path, tmp_path: Path) -> None:
    folder = roots / "sharded"
    written(folder / "b.safetensors", {"scale": GOOD["scale"]})
    written(folder / "a.safetensors", {name: GOOD[name] for name in ("norm.weight", "embed.weight")})
    write_checkpoint(folder, tmp_path / "full")
    loaded = load_file(tmp_path / "full")
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in GOOD.items()
    }
    assert read_header(tmp_path / "full").entries[0].begin == 0


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

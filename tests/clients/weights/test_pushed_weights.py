"""The copy of the weights that were pushed last: each capture gives the service exactly the source's weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from rollout_client import PolicyState
from rollout_client.contract.policy import PolicyUpdate, VersionInfo
from rollout_client.errors import WeightsDiffer
from rollout_client.weights.pushed_weights import CapturedWeights, PushedWeights
from rollout_client.weights.safetensors_file import TensorEntry, Weights, header_bytes, read_header
from rollout_client.weights.sources import full_weights
from tests.clients.scripted_policy import CREATED_AT, layout_of
from tests.clients.weights.applied_deltas import apply_delta

LAYOUT = {"embed.weight": ("BF16", [64, 8]), "norm.weight": ("F32", [8])}


def weights_of(embed: torch.Tensor) -> Weights:
    """Each tensor is read in two blocks."""
    weights = full_weights({"embed.weight": embed, "norm.weight": torch.zeros(8)}, layout_of(LAYOUT))

    def read(entry: TensorEntry) -> Iterator[bytes]:
        data = b"".join(map(bytes, weights.read(entry)))
        yield data[:8]
        yield data[8:]

    return replace(weights, read=read)


def update_to(version: int, checksum: str | None) -> PolicyUpdate:
    return PolicyUpdate(version=version, checksum=checksum, replicas=[])


def state_of(current: int, *versions: tuple[int, str | None]) -> PolicyState:
    infos = [
        VersionInfo(version=version, kind="full", checksum=checksum, created_at=CREATED_AT)
        for version, checksum in versions
    ]
    return PolicyState(current=current, versions=infos, replicas=[])


def received(captured: CapturedWeights, folder: Path) -> bytes:
    """The file of full weights that a service has after the upload of `captured`; `folder` holds the one before."""
    content = b"".join(bytes(block) for block in captured.weights.blocks())
    base, delta = folder / "base.safetensors", folder / "delta.safetensors"
    if captured.kind == "delta":
        delta.write_bytes(content)
        header = read_header(base)
        tensors = b"".join(bytes(data) for _, data in apply_delta(base, delta))
        content = header_bytes(header.entries, header.metadata) + tensors
    base.write_bytes(content)
    return content


@given(st.lists(st.lists(st.tuples(st.integers(0, 511), st.binary(min_size=2, max_size=2)), max_size=400), max_size=5))
def test_after_any_steps_the_service_has_the_weights_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[int, bytes]]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    pushed = PushedWeights()
    embed = torch.zeros(64, 8, dtype=torch.bfloat16)
    for version, step in enumerate([[], *steps], start=1):
        for place, value in step:
            embed.view(-1)[place] = torch.frombuffer(bytearray(value), dtype=torch.bfloat16)[0]
        captured = pushed.capture(weights_of(embed))
        assert captured.base in ({None} if version == 1 else {None, version - 1})
        pushed.confirm(captured, update_to(version, captured.checksum))
        pushed.check(state_of(version, (version, captured.checksum)))
        content = received(captured, folder)
        loaded = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in load(content).items()}
        assert loaded == {"embed.weight": embed.view(torch.uint8).numpy().tobytes(), "norm.weight": bytes(32)}


def pushed_once(checksum_there: str | None = "as here", is_verified: bool = True) -> tuple[PushedWeights, str | None]:
    """After a push of version 1; `as here` is the checksum that was computed here."""
    pushed = PushedWeights(is_verified)
    captured = pushed.capture(weights_of(torch.zeros(64, 8)))
    pushed.confirm(captured, update_to(1, captured.checksum if checksum_there == "as here" else checksum_there))
    return pushed, captured.checksum


def next_base(pushed: PushedWeights) -> int | None:
    return pushed.capture(weights_of(torch.zeros(64, 8))).base


def test_a_capture_that_was_not_confirmed_is_no_base() -> None:
    pushed = PushedWeights()
    pushed.capture(weights_of(torch.ones(64, 8)))
    assert next_base(pushed) is None


def test_a_delta_that_was_not_confirmed_leaves_its_base() -> None:
    pushed, _ = pushed_once()
    pushed.capture(weights_of(torch.eye(64, 8)))
    captured = pushed.capture(weights_of(torch.eye(64, 8)))
    assert (captured.base, sum(changed.gaps.size for changed in captured.changes.values())) == (1, 8)


def test_weights_of_another_layout_are_full_weights() -> None:
    pushed, _ = pushed_once()
    other = full_weights({"embed.weight": torch.zeros(2)}, layout_of({"embed.weight": ("F32", [2])}))
    assert pushed.capture(other).base is None


@pytest.mark.parametrize(
    ("current", "versions", "base"),
    [
        (1, [(1, "as here")], 1),
        (1, [(1, None)], 1),
        (1, [(1, "another")], None),
        (1, [(0, None)], None),
        (2, [(1, "as here"), (2, None)], None),
    ],
    ids=["the same", "checksum unknown", "another checksum", "no longer kept", "no longer current"],
)
def test_a_base_must_be_the_services_current_version_and_the_same_there(
    current: int, versions: list[tuple[int, str | None]], base: int | None
) -> None:
    pushed, checksum = pushed_once()
    pushed.check(state_of(current, *[(one, checksum if there == "as here" else there) for one, there in versions]))
    assert next_base(pushed) == base


def test_after_another_checksum_at_the_service_full_weights_are_captured() -> None:
    pushed = PushedWeights()
    captured = pushed.capture(weights_of(torch.zeros(64, 8)))
    with pytest.raises(WeightsDiffer, match=f"^Version 1 has checksum other at the service and {captured.checksum} he"):
        pushed.confirm(captured, update_to(1, "other"))
    assert next_base(pushed) is None


def test_without_verification_no_checksum_is_computed_and_none_compared() -> None:
    pushed, checksum = pushed_once("other", is_verified=False)
    assert checksum is None
    pushed.check(state_of(1, (1, "another")))
    assert next_base(pushed) == 1


def test_a_service_that_says_no_checksum_is_believed() -> None:
    assert next_base(pushed_once(checksum_there=None)[0]) == 1


@pytest.mark.parametrize("is_verified", [False, True])
def test_weights_that_were_hashed_at_their_capture_are_not_hashed_again(is_verified: bool) -> None:
    pushed, embed = PushedWeights(is_verified), torch.zeros(64, 8, dtype=torch.bfloat16)
    full = pushed.capture(weights_of(embed))
    assert (full.weights.checksum is not None, full.weights.checksum) == (is_verified, full.checksum)
    pushed.confirm(full, update_to(1, full.checksum))
    embed[0, 0] = 1.0
    delta = pushed.capture(weights_of(embed))
    assert (delta.kind, delta.weights.checksum) == ("delta", None), "its checksum is of the weights that it makes"

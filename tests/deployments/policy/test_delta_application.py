"""Deltas become full weights, bit for bit what their sender has."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from deployments.policy.assembly import write_applied
from deployments.policy.failures import WeightsRefused
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import header_bytes, header_of
from tests.deployments.policy.delta_files import delta_of
from tests.deployments.policy.weight_files import GOOD, written


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(st.binary(min_size=24, max_size=24), st.binary(min_size=24, max_size=24))
def test_a_delta_gives_the_new_weights_bit_for_bit(tmp_path: Path, before: bytes, after: bytes) -> None:
    start = header_bytes(header_of([("a", "F32", (3,)), ("b", "BF16", (2, 3))]).entries)
    base, new = tmp_path / "base", tmp_path / "new"
    base.write_bytes(start + before)
    new.write_bytes(start + after)
    checksum = write_applied(base, delta_of(base, new, tmp_path / "delta"), tmp_path / "full")
    assert (tmp_path / "full").read_bytes() == start + after
    assert checksum == file_checksum(new)


def test_the_header_of_the_base_stays_as_it_is_with_its_metadata_and_its_padding(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    content = base.read_bytes()
    length = int.from_bytes(content[:8], "little")
    padded = (length + 64).to_bytes(8, "little") + content[8 : 8 + length] + b" " * 64 + content[8 + length :]
    base.write_bytes(padded)
    checksum = write_applied(base, written(tmp_path / "delta", {}), tmp_path / "full")
    assert (tmp_path / "full").read_bytes() == padded
    assert checksum == file_checksum(base)


def test_a_tensor_without_values_stays_empty(tmp_path: Path) -> None:
    base = written(tmp_path / "base", {"empty": torch.zeros(0, 4), "scale": torch.tensor([1.0, 2.0])})
    delta = {"scale.gaps": torch.ones(1, dtype=torch.int32), "scale.values": torch.tensor([5.0])}
    write_applied(base, written(tmp_path / "delta", delta), tmp_path / "full")
    made = load_file(tmp_path / "full")
    assert (made["empty"].shape, made["scale"].tolist()) == ((0, 4), [1.0, 5.0])


def test_a_delta_of_other_weights_is_found_out(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    delta = {"scale.gaps": torch.ones(1, dtype=torch.int32), "scale.values": torch.ones(1)}
    with pytest.raises(WeightsRefused, match="scale: place 1 is changed, and the tensor has only 1 values"):
        write_applied(base, written(tmp_path / "delta", delta), tmp_path / "full")


def test_a_base_that_was_cut_short_is_found_out(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    base.write_bytes(base.read_bytes()[:-1])
    with pytest.raises(WeightsRefused, match="it is not whole"):
        write_applied(base, written(tmp_path / "delta", {}), tmp_path / "full")

"""Everything that makes a delta unfit is found without the weights that it changes."""

from pathlib import Path

import pytest
import torch

from deployments.policy.versions.weight_checks import validate_delta
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.delta_files import delta_of
from tests.deployments.policy.weight_files import GOOD, LAYOUT, Tensors, refusal, written


def changes(name: str, gaps: list[int], values: list[float]) -> Tensors:
    return {f"{name}.gaps": torch.tensor(gaps, dtype=torch.int32), f"{name}.values": torch.tensor(values)}


def test_a_delta_has_the_checksum_of_its_own_tensors(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    new = written(tmp_path / "new", {**GOOD, "scale": torch.tensor(7.0), "norm.weight": GOOD["norm.weight"] * 3})
    delta = delta_of(base, new, tmp_path / "delta")
    assert validate_delta(delta, LAYOUT) == file_checksum(delta)


def test_a_delta_of_nothing_is_one(tmp_path: Path) -> None:
    delta = written(tmp_path / "delta", {})
    assert validate_delta(delta, LAYOUT) == file_checksum(delta)


@pytest.mark.parametrize(
    ("parts", "finding"),
    [
        ({"norm.weight": torch.ones(3)}, ("norm.weight", "a delta holds only names that end in .gaps or .values")),
        (changes("lm_head", [0], [1.0]), ("lm_head", "the base has no such tensor")),
        ({"scale.gaps": torch.zeros(1, dtype=torch.int32)}, ("scale", "scale.values is missing")),
        (
            {"scale.gaps": torch.zeros(1, dtype=torch.int64), "scale.values": torch.ones(1)},
            ("scale", "gaps are I64; they must be I32"),
        ),
        (changes("norm.weight", [0], [1.0]), ("norm.weight", "values are F32 where the base has BF16")),
        (changes("scale", [1], [1.0]), ("scale", "place 1 is changed, and the tensor has only 1 values")),
        (
            changes("scale", [-1], [1.0]),
            ("scale", "a gap is too small: the first must be at least 0, the others at least 1"),
        ),
        (
            changes("scale", [0, 0], [1.0, 2.0]),
            ("scale", "a gap is too small: the first must be at least 0, the others at least 1"),
        ),
        (changes("scale", [0], [float("nan")]), ("scale", "it holds NaN or infinity; the training has diverged")),
        (changes("scale", [0], [float("-inf")]), ("scale", "it holds NaN or infinity; the training has diverged")),
    ],
)
def test_changes_that_no_weights_of_the_model_can_have_are_refused(
    tmp_path: Path, parts: Tensors, finding: tuple[str, str]
) -> None:
    assert refusal(validate_delta, written(tmp_path / "delta", parts), LAYOUT) == [finding]


def test_a_delta_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    delta = written(tmp_path / "delta", changes("scale", [0], [1.0]))
    content = delta.read_bytes()
    delta.write_bytes(content[:-1])
    message = f"the delta has {len(content) - 1} bytes, its header says {len(content)}: it is not whole"
    assert refusal(validate_delta, delta, LAYOUT) == [("weights", message)]
    delta.write_bytes(b"")
    message = "the delta is not a safetensors file, or was cut off: it ends within its header"
    assert refusal(validate_delta, delta, LAYOUT) == [("weights", message)]

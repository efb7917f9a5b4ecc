"""Deltas as patches, by vLLM's own function on a small module that stacks tensors of the checkpoint as models do."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.generation.weight_deltas import apply_patches, read_patches
from tests.deployments.policy.delta_files import delta_of

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
torch.manual_seed(0)
BASE = {
    "norm.weight": torch.randn(4).bfloat16(),
    "q_proj.weight": torch.randn(4, 4).bfloat16(),
    "k_proj.weight": torch.randn(2, 4).bfloat16(),
}
STACKED = {"q_proj.weight": (0, 4), "k_proj.weight": (4, 6)}


class Model(torch.nn.Module):
    """Loads two tensors of the checkpoint into one of its own, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_proj = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name in STACKED:
                first, end = STACKED[name]
                self.qk_proj.data[first:end].copy_(tensor)
            else:
                self.norm.data.copy_(tensor)
        return set()

    def assert_holds(self, weights: dict[str, torch.Tensor]) -> None:
        assert torch.equal(self.norm, weights["norm.weight"])
        assert torch.equal(self.qk_proj, torch.cat([weights["q_proj.weight"], weights["k_proj.weight"]]))


def changed() -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for name, tensor in BASE.items()}
    weights["k_proj.weight"][1, 3] = 7.0
    weights["k_proj.weight"][0, 0] = -0.0
    weights["norm.weight"][2] = 5.0
    return weights


def test_patches_make_the_new_weights_of_the_old_ones(tmp_path: Path) -> None:
    for name, weights in (("base", BASE), ("new", changed())):
        save_file(weights, tmp_path / name)
    delta = delta_of(tmp_path / "base", tmp_path / "new", tmp_path / "delta")
    model = Model()
    model.load_weights(BASE.items())
    apply_patches(model, read_patches(str(delta), str(tmp_path / "new")))
    model.assert_holds(load_file(tmp_path / "new"))


def test_an_empty_delta_changes_nothing(tmp_path: Path) -> None:
    save_file(BASE, tmp_path / "base")
    delta = delta_of(tmp_path / "base", tmp_path / "base", tmp_path / "delta")
    model = Model()
    model.load_weights(BASE.items())
    apply_patches(model, read_patches(str(delta), str(tmp_path / "base")))
    model.assert_holds(BASE)


def test_a_delta_of_integers_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    for name, value in (("base", 1), ("new", 2)):
        save_file({"table": torch.tensor([0, value])}, tmp_path / name)
    delta = delta_of(tmp_path / "base", tmp_path / "new", tmp_path / "delta")
    with pytest.raises(ValueError, match=r"^table is torch.int64; only floating values can be patched"):
        read_patches(str(delta), str(tmp_path / "new"))

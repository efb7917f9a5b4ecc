"""Torch tensors as a source of weights: names, casts, ties, shards, and modules as PEFT wraps them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn

from rollout_client.contract.policy import PolicyLayout
from rollout_client.weights.model_tensors import DTYPES, TorchTensor, cast
from rollout_client.weights.torch_tensors import AdapterNotMerged, torch_tensors
from tests.clients.weights.sharded_push import EXPERTS
from tests.model_families import random_model

DATA = torch.tensor([[1.0, -2.5], [0.0, 3.0]])
LAYOUT = PolicyLayout(tensors={})


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def read(tensor: torch.Tensor, dtype: str) -> bytes:
    return b"".join(bytes(block) for block in TorchTensor(tensor).blocks(dtype))


@pytest.mark.parametrize("name", ["layers.0.weight", "_orig_mod.layers.0.weight"])
def test_of_two_tensors_with_one_name_none_is_lost(name: str) -> None:
    both = {name: DATA, "module.layers.0.weight": DATA + 1}
    assert torch_tensors(both, LAYOUT).keys() == both.keys()


def test_a_module_is_its_state_dict_and_other_values_are_ignored() -> None:
    assert list(torch_tensors(nn.Linear(2, 2), LAYOUT)) == ["weight", "bias"]
    assert list(torch_tensors({"step": 3, "weight": DATA}, LAYOUT)) == ["weight"]  # type: ignore[dict-item]


def test_of_partial_weights_of_a_module_the_frozen_parameters_are_left_out() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
            self.register_buffer("counted", DATA)

    module = nn.ModuleDict({"module": Trained()})
    assert list(torch_tensors(module, LAYOUT, is_partial=True)) == ["counted", "trained.weight", "trained.bias"]
    assert list(torch_tensors({"weight": DATA}, LAYOUT, is_partial=True)) == ["weight"]


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_a_tensor_has_the_dtype_name_of_safetensors_and_its_own_bytes(name: str, dtype: torch.dtype) -> None:
    tensor = DATA.to(dtype)
    assert (TorchTensor(tensor).dtype, TorchTensor(tensor).shape) == (name, (2, 2))
    assert read(tensor, name) == bytes_of(tensor)


def test_a_dtype_that_safetensors_cannot_hold_is_named_as_torch_names_it() -> None:
    assert TorchTensor(DATA.to(torch.complex128)).dtype == "torch.complex128"


def test_a_tensor_is_cast_and_laid_out_row_by_row() -> None:
    assert read(DATA.T, "BF16") == bytes_of(DATA.T.contiguous().bfloat16())


def test_data_of_a_file_are_cast_as_torch_casts_them() -> None:
    assert bytes(cast(bytes_of(DATA), "F32", "BF16")) == bytes_of(DATA.bfloat16())
    assert bytes(cast(b"", "F32", "BF16")) == b""


def test_tensors_are_tied_if_they_share_memory_or_dtype_and_values() -> None:
    tensor = TorchTensor(DATA)
    assert tensor.is_tied_to(TorchTensor(DATA.view(2, 2)))
    assert tensor.is_tied_to(TorchTensor(DATA.clone()))
    assert not tensor.is_tied_to(TorchTensor(DATA + 1))
    assert not tensor.is_tied_to(TorchTensor(DATA.double()))
    assert not tensor.is_tied_to(TorchTensor(DATA.T))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_sharded_model_is_gathered_by_all_its_processes(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.clients.weights.sharded_push", str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    loaded = load((tmp_path / "whole.safetensors").read_bytes())
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "embed": torch.arange(15).reshape(5, 3).tolist(),
        "norm": [1, 1, 1],
    }
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    experts = random_model("qwen3-moe", 0).model.layers[0].mlp.experts.gate_up_proj.detach().bfloat16()
    split = load((tmp_path / "experts.safetensors").read_bytes())
    assert len(split) == 8
    for expert, fused in enumerate(experts):
        for name, part in zip(("gate", "up"), fused.chunk(2), strict=True):
            assert torch.equal(split[f"{EXPERTS}.{expert}.{name}_proj.weight"], part)


@pytest.fixture
def adapted() -> Any:
    """A model in PEFT's wrapper: one layer has an adapter, and one is trained as a whole."""
    peft = pytest.importorskip("peft")
    layers = {"embed": nn.Embedding(2, 2), "q_proj": nn.Linear(2, 2), "head": nn.Linear(2, 2)}
    config = peft.LoraConfig(r=1, target_modules=["q_proj"], modules_to_save=["head"], init_lora_weights=False)
    return peft.get_peft_model(nn.ModuleDict(layers), config)


def sent(module: nn.Module, is_partial: bool = False) -> dict[str, torch.Tensor]:
    tensors = torch_tensors(module, LAYOUT, is_partial)
    return {name: tensor.tensor for name, tensor in tensors.items() if isinstance(tensor, TorchTensor)}


@pytest.mark.parametrize("is_wrapped_by_ddp", [False, True])
def test_merged_weights_have_the_names_of_the_model_inside(adapted: Any, is_wrapped_by_ddp: bool) -> None:
    adapted.merge_adapter()
    tensors = sent(nn.ModuleDict({"module": adapted}) if is_wrapped_by_ddp else adapted)
    assert list(tensors) == ["embed.weight", "q_proj.weight", "q_proj.bias", "head.weight", "head.bias"]
    inside = adapted.base_model.model
    assert torch.equal(tensors["q_proj.weight"], inside["q_proj"].base_layer.weight)
    assert torch.equal(tensors["head.weight"], inside["head"].modules_to_save["default"].weight)
    assert list(sent(inside)) == list(tensors)


def test_of_partial_weights_what_was_merged_counts_as_trained(adapted: Any) -> None:
    adapted.merge_adapter()
    assert list(sent(adapted, is_partial=True)) == ["q_proj.weight", "q_proj.bias", "head.weight", "head.bias"]


def test_an_adapter_that_is_not_merged_is_refused(adapted: Any) -> None:
    with pytest.raises(
        AdapterNotMerged, match=r"adapter of base_model\.model\.q_proj is not merged.*merge_adapter\(\)"
    ):
        sent(adapted)

"""Transformers modules as checkpoints: the names and the values that `save_pretrained` writes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn
from transformers.core_model_loading import Chunk, WeightConverter

from rollout_client.contract.policy import PolicyLayout, TensorLayout
from rollout_client.weights.file_tensors import file_tensors
from rollout_client.weights.layout import WeightsDoNotFit
from rollout_client.weights.sources import TensorsSource, full_weights
from rollout_client.weights.torch_tensors import GatheredState
from tests.model_families import FAMILIES, MIXTURES, random_model

State = dict[str, torch.Tensor]


@cache
def model_of(family: str) -> Any:
    return random_model(family, 0)


def saved(model: Any, folder: Path, **options: Any) -> tuple[State, PolicyLayout]:
    """What `save_pretrained` writes, and the layout of a service that serves it."""
    model.save_pretrained(folder, **options)
    tensors = {
        name: TensorLayout(dtype=tensor.dtype, shape=list(tensor.shape))
        for name, tensor in file_tensors(folder).items()
    }
    return load_file(folder / "model.safetensors"), PolicyLayout(tensors=tensors)


def sent(source: TensorsSource, layout: PolicyLayout, is_partial: bool = False) -> State:
    tensors: State = load(b"".join(bytes(block) for block in full_weights(source, layout, is_partial).blocks()))
    return tensors


def assert_same(tensors: State, expected: State) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


class Wrapper(nn.Module):
    """As DDP wraps a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_is_sent_as_save_pretrained_writes_it(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    expected, layout = saved(model, tmp_path)
    assert_same(sent(model, layout), expected)


def gathered(model: Any) -> GatheredState:
    return GatheredState(Wrapper(model), {name: tensor.clone() for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize("source_of", [Wrapper, gathered])
def test_a_wrapped_module_and_its_gathered_state_are_sent_as_the_model(
    source_of: Callable[[Any], TensorsSource], tmp_path: Path
) -> None:
    model = model_of("qwen3-moe")
    expected, layout = saved(model, tmp_path)
    assert_same(sent(source_of(model), layout), expected)


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_a_checkpoint_saved_without_conversion_gets_the_modules_tensors(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    expected, layout = saved(model, tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in expected
    assert_same(sent(model, layout), expected)


def test_of_partial_weights_only_what_is_trained_is_sent(tmp_path: Path) -> None:
    model = random_model("qwen3-moe", 1)
    expected, layout = saved(model, tmp_path)
    model.requires_grad_(False)
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(True)
    model.lm_head.requires_grad_(True)
    trained = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(4)] + ["lm_head.weight"]
    assert_same(sent(model, layout, is_partial=True), {name: expected[name] for name in trained})


def test_what_is_converted_is_cast_to_the_dtype_of_the_service(tmp_path: Path) -> None:
    model = random_model("qwen3-moe", 0)
    expected, layout = saved(model, tmp_path)
    tensors = {name: TensorLayout(dtype="BF16", shape=tensor.shape) for name, tensor in layout.tensors.items()}
    cast = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_same(sent(model, PolicyLayout(tensors=tensors)), cast)


def test_converted_weights_can_be_read_in_any_order_and_again(tmp_path: Path) -> None:
    model = model_of("qwen3-moe")
    expected, layout = saved(model, tmp_path)
    weights = full_weights(model, layout)
    assert weights.is_repeatable
    for _ in range(2):
        for entry in reversed(weights.header.entries):
            data = b"".join(bytes(block) for block in weights.read(entry))
            assert data == expected[entry.name].view(torch.uint8).numpy().tobytes()


def converting(model: Any, converter: WeightConverter) -> Any:
    """The model with another conversion of transformers."""
    vars(model)["_weight_conversions"] = [converter]
    return model


@pytest.fixture
def fused() -> Any:
    """A Llama whose checkpoint holds queries, keys and values as one tensor."""
    model = random_model("llama", 2)
    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    return converting(model, WeightConverter("self_attn.qkv.weight", parts, [ThreeParts(dim=0)]))


class ThreeParts(Chunk):
    """Parts of different sizes, which is not what `Chunk` makes; only its reverse is used here."""


def test_tensors_that_the_checkpoint_holds_as_one_are_sent_as_one(fused: Any, tmp_path: Path) -> None:
    expected, layout = saved(fused, tmp_path)
    layer = fused.model.layers[1].self_attn
    qkv = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
    assert torch.equal(expected["model.layers.1.self_attn.qkv.weight"], qkv)
    assert_same(sent(fused, layout), expected)


def test_a_tensor_that_lacks_others_of_its_counterpart_is_refused(fused: Any, tmp_path: Path) -> None:
    _, layout = saved(fused, tmp_path)
    fused.requires_grad_(False)
    fused.model.layers[1].self_attn.q_proj.requires_grad_(True)
    with pytest.raises(WeightsDoNotFit) as refused:
        full_weights(fused, layout, is_partial=True)
    assert refused.value.wrong == {"model.layers.1.self_attn.qkv.weight": "has shape [64, 64] instead of [128, 64]"}


def test_a_tensor_that_transformers_cannot_convert_is_named(fused: Any, tmp_path: Path) -> None:
    _, layout = saved(random_model("llama", 0), tmp_path)
    converting(fused, WeightConverter("a", ["input_layernorm.weight", "q_proj.weight"], [Chunk(dim=1)]))
    with pytest.raises(ValueError, match=r"transformers cannot convert model\.layers\.0\.input_layernorm\.weight to"):
        full_weights(fused, layout)

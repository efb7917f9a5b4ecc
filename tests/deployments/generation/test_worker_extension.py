"""What a worker does around vLLM's reloading; the swap itself needs an engine: `tests/live/test_engine.py`."""

from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from deployments.generation.worker_extension import pack_shared_weights_again
from deployments.upstream.vllm.weight_transfer import end_broken_reload

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


class Packing:
    """Packs as vLLM's build for processors does: the layer computes with a copy of its weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.T


class Layer(torch.nn.Module):
    cpu_linear: Any

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.quant_method = Packing()
        self.quant_method.process_weights_after_loading(self)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = torch.nn.Parameter(torch.eye(2))
        self.embed_tokens, self.inner, self.lm_head = (
            Layer(shared),
            Layer(torch.nn.Parameter(torch.eye(2))),
            Layer(shared),
        )
        self.norm = torch.nn.LayerNorm(2)


def test_layers_that_share_a_weight_compute_with_the_new_one() -> None:
    model = Model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    # What a reload does for each layer under whose name the checkpoint has a weight.
    for layer in (model.embed_tokens, model.inner):
        layer.quant_method.process_weights_after_loading(layer)
    inner = model.inner.cpu_linear
    pack_shared_weights_again(model)
    assert model.lm_head.cpu_linear(torch.ones(2)).tolist() == [3.0, 3.0]
    assert model.inner.cpu_linear is inner


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.second = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def load(self, **weights: float) -> None:
        for name, value in weights.items():
            parameter = self.get_parameter(name)
            load: Any = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, torch.full((2,), value))


def test_what_arrived_of_a_reload_that_broke_off_is_no_part_of_the_next() -> None:
    model, config = Pair(), Any
    in_use = model.first
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    model.load(first=1.0)
    assert model.first is not in_use
    end_broken_reload(model)
    assert (model.first is in_use, model.first.tolist()) == (True, [0.0, 0.0])
    initialize_layerwise_reload(model)
    model.load(first=2.0, second=2.0)
    finalize_layerwise_reload(model, config)  # type: ignore[no-untyped-call]
    assert (model.first is in_use, model.first.tolist(), model.second.tolist()) == (True, [2.0, 2.0], [2.0, 2.0])

"""What a worker does after a swap beside reloading; the swap itself needs an engine: `tests/live/test_engine.py`."""

from typing import Any

import torch

from deployments.generation.worker_extension import pack_shared_weights_again


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

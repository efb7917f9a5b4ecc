"""Patches of vLLM's build for processors, with and without them."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import cpu_attn

from deployments.upstream.vllm.cpu_build import _pack_experts_at_each_load, pack_shared_weights_again

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
CAN_GO = "vLLM does it by itself: drop the patch"
LOOK_AGAIN = "vLLM does otherwise: try whether the patch can go"


class ScriptedExperts:
    """Packs as vLLM's method for experts does: at the first load only."""

    def __init__(self) -> None:
        self.moe_kernel: SimpleNamespace | None = None

    def _setup_kernel(self, layer: SimpleNamespace, w13: str, w2: str) -> None:
        layer.weights = [w13, w2]
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=self)
            self.process_weights_after_loading(layer)

    def load(self, layer: SimpleNamespace, *weights: str) -> None:
        self._setup_kernel(layer, *weights)

    def process_weights_after_loading(self, layer: SimpleNamespace) -> None:
        layer.weights = [f"packed {weight}" for weight in layer.weights]


def test_experts_are_packed_once_at_each_load() -> None:
    for _ in range(2):
        _pack_experts_at_each_load(ScriptedExperts)
    experts, layer = ScriptedExperts(), SimpleNamespace()
    for weights in (["w13", "w2"], ["new w13", "new w2"]):
        experts.load(layer, *weights)
        assert layer.weights == [f"packed {weight}" for weight in weights]


def test_experts_must_still_be_packed_and_openmps_path_shortened() -> None:
    setup = inspect.getsource(inspect.unwrap(vars(UnquantizedFusedMoEMethod)["_setup_kernel"]))
    packing = setup.index("process_weights_after_loading(layer)")
    assert setup.rindex("if not is_weight_update:", 0, packing) > 0, LOOK_AGAIN
    assert 'os.environ["LD_PRELOAD"] = ld_preload_str' in inspect.getsource(CpuPlatform), LOOK_AGAIN


def test_amx_tiles_must_still_be_asked_for() -> None:
    assert "init_amx" not in inspect.getsource(CpuPlatform) + inspect.getsource(cpu_attn), CAN_GO


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

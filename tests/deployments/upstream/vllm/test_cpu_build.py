"""Patches of vLLM's build for processors, with and without them."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms.cpu import CpuPlatform
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.sample.ops import topk_topp_sampler

from deployments.upstream.vllm.cpu_build import (
    _for_each_draft,
    _leave_no_rows,
    _pack_experts_at_each_load,
    _try_packed_weights,
    pack_shared_weights_again,
)

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


def test_a_requests_value_is_repeated_for_each_of_its_drafts() -> None:
    values, ends = torch.tensor([0.7, 0.0, 1.5, 2.0]), torch.tensor([2, 3, 3, 5], dtype=torch.int32)
    assert _for_each_draft(values, ends, 5, 0, 1).tolist() == pytest.approx([0.7, 0.7, 1.0, 2.0, 2.0])
    assert _for_each_draft(torch.tensor([3, 7], dtype=torch.int32), torch.tensor([0, 2]), 2).tolist() == [7, 7]


def test_the_kernel_must_still_be_replaced_that_repeats_for_drafts() -> None:
    output = torch.full((3,), -9.0)
    values, ends = torch.tensor([0.7, 1.5]), torch.tensor([1, 3], dtype=torch.int32)
    vars(cpu_triton_utils)["_expand_kernel_impl"](output, values, ends, 0, 1)
    assert output.tolist() == [-9.0] * 3, CAN_GO


def test_the_top_k_of_no_rows_is_none_and_must_still_be_left() -> None:
    sampler = SimpleNamespace(apply_top_k_only=inspect.unwrap(topk_topp_sampler.apply_top_k_only))
    for _ in range(2):
        _leave_no_rows(sampler)
    none, rows, k = torch.empty(0, 5), torch.arange(10.0).reshape(2, 5), torch.tensor([1, 5])
    assert sampler.apply_top_k_only(none, k[:0]) is none
    assert sampler.apply_top_k_only(rows, k).isfinite().sum(-1).tolist() == [1, 5]
    with pytest.raises(RuntimeError, match="max"):
        inspect.unwrap(sampler.apply_top_k_only)(none, k[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_whose_kernel_multiplies_by_other_values_computes_with_its_weight(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in ((6, 4), (3, 4), (6,)))
    for kernel in (weight, weight.flip(0), weight.roll(1, 1)):

        def dispatch(layer: Any, remove_weight: bool, kernel: torch.Tensor = kernel) -> None:
            layer.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(x, kernel, bias)
            if remove_weight:
                layer.weight = torch.nn.Parameter(torch.empty(0))

        layers = SimpleNamespace(dispatch_cpu_unquantized_gemm=dispatch)
        for _ in range(2):
            _try_packed_weights(layers)
        layer = SimpleNamespace(weight=torch.nn.Parameter(weight))
        layers.dispatch_cpu_unquantized_gemm(layer, True)
        assert torch.equal(layer.cpu_linear(x, layer.weight, bias), torch.nn.functional.linear(x, weight, bias))
        assert layer.weight.numel() == 0


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

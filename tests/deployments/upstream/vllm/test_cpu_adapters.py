"""The products of adapters in vLLM's build for processors, compared with vLLM's own."""

import importlib
import inspect
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.ops.torch_ops import lora_ops

from deployments.upstream.vllm.cpu_build import _expand, _expand_slice, _multiply_once_an_adapter, _shrink

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
CAN_GO = "vLLM does it by itself: drop the patch"
RANK, WIDTH, ADAPTERS = 3, 5, 3


def as_vllm_has_it() -> ModuleType:
    return importlib.reload(lora_ops)


def test_an_adapter_is_added_to_its_own_tokens_only() -> None:
    operations = ModuleType("operations", "vLLM's, as they come")
    _multiply_once_an_adapter(operations)
    adapters = torch.tensor([[[[1.0, 2.0]]], [[[30.0, 40.0]]]])
    hidden, shrunk = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), torch.full((3, 1), 9.0)
    indices = torch.tensor([0, -1, 1])
    operations.bgmv_shrink(hidden, adapters, shrunk, indices, 2.0)
    assert shrunk.tolist() == [[6.0], [0.0], [140.0]]
    outputs = torch.full((3, 2), 5.0)
    operations.bgmv_expand(torch.ones(3, 1), adapters.transpose(2, 3), outputs, indices, add_inputs=True)
    assert outputs.tolist() == [[6.0, 7.0], [5.0, 5.0], [35.0, 45.0]]
    operations.bgmv_expand_slice(torch.ones(3, 1), adapters.transpose(2, 3), outputs, indices, 0, 2, add_inputs=True)
    assert outputs.tolist() == [[7.0, 9.0], [5.0, 5.0], [65.0, 85.0]]


@given(
    adapters=st.lists(st.integers(0, ADAPTERS - 1), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    left_alone=st.booleans(),
    add_inputs=st.booleans(),
    offset=st.integers(0, 2),
)
def test_products_are_vllms(adapters: list[int], seed: int, left_alone: bool, add_inputs: bool, offset: int) -> None:
    own = as_vllm_has_it()
    made = torch.Generator().manual_seed(seed)
    indices, tokens = torch.tensor(adapters), len(adapters)
    inputs = torch.randn(tokens, WIDTH, generator=made, dtype=torch.bfloat16)
    first = torch.randn(ADAPTERS, 1, RANK, WIDTH, generator=made, dtype=torch.bfloat16) * (not left_alone)
    second = torch.randn(ADAPTERS, 1, WIDTH, RANK, generator=made, dtype=torch.bfloat16)
    outputs = torch.randn(tokens, WIDTH + 2, generator=made, dtype=torch.bfloat16)
    shrunk, expected_shrunk = torch.zeros(tokens, RANK), torch.zeros(tokens, RANK)
    _shrink(inputs, first, shrunk, indices, 0.5)
    own.bgmv_shrink(inputs, first, expected_shrunk, indices, 0.5)
    torch.testing.assert_close(shrunk, expected_shrunk)
    actual, expected = outputs.clone(), outputs.clone()
    _expand_slice(shrunk, second, actual, indices, offset, WIDTH, add_inputs)
    own.bgmv_expand_slice(shrunk, second, expected, indices, offset, WIDTH, add_inputs)
    torch.testing.assert_close(actual, expected)
    narrow, expected = outputs[:, : WIDTH - 1].clone(), outputs[:, : WIDTH - 1].clone()
    _expand(shrunk, second, narrow, indices)
    own.bgmv_expand(shrunk, second, expected, indices)
    torch.testing.assert_close(narrow, expected)


def test_tokens_without_an_adapter_must_still_be_kept_from_adapters() -> None:
    shrunk = torch.zeros(1, 1)
    as_vllm_has_it().bgmv_shrink(torch.ones(1, 2), torch.tensor([[[[30.0, 40.0]]]]), shrunk, torch.tensor([-1]), 2.0)
    assert shrunk.tolist() == [[140.0]], CAN_GO


def test_matrices_must_still_be_kept_from_being_copied_for_each_token() -> None:
    assert "lora_b_weights[lora_indices_tensor]" in inspect.getsource(as_vllm_has_it().bgmv_shrink), CAN_GO

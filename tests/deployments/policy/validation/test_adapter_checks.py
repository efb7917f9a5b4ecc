"""Whether the matrices of an adapter fit the model."""

import pytest

from deployments.policy.validation.adapter_checks import adapter_problems
from rollout_client.policy_contract import PolicyLayout, TensorLayout
from rollout_client.weights.safetensors_file import header_of

LAYER = "model.layers.0.self_attn.o_proj"
LAYOUT = PolicyLayout(
    tensors={
        f"{LAYER}.weight": TensorLayout(dtype="BF16", shape=[12, 8]),
        "model.norm.weight": TensorLayout(dtype="BF16", shape=[8]),
    }
)
A, B = f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight"


def problems(shapes: dict[str, tuple[int, ...]], config: str = "{}") -> list[tuple[str, str]]:
    header = header_of((name, "F32", shape) for name, shape in shapes.items())
    return [(problem.field, problem.message) for problem in adapter_problems(header, config, LAYOUT)]


def test_matrices_of_the_layers_size_and_one_rank_fit() -> None:
    assert problems({A: (4, 8), B: (12, 4)}) == []


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ((4, 7), (12, 4), [(A, f"its shape is [4, 7]; {LAYER} takes [rank, 8]")]),
        ((4, 8), (8, 4), [(B, f"its shape is [8, 4]; {LAYER} takes [12, 4]")]),
        ((4, 8), (12, 3), [(B, f"its shape is [12, 3]; {LAYER} takes [12, 4]")]),
        ((32,), (12, 32), [(A, f"its shape is [32]; {LAYER} takes [rank, 8]")]),
    ],
)
def test_each_matrix_that_does_not_fit_is_named(
    a: tuple[int, ...], b: tuple[int, ...], found: list[tuple[str, str]]
) -> None:
    assert problems({A: a, B: b}) == found


def test_one_half_alone_is_compared_with_the_layer() -> None:
    assert problems({B: (11, 4)}) == [(B, f"its shape is [11, 4]; {LAYER} takes [12, rank]")]


@pytest.mark.parametrize("name", ["base_model.model.other.lora_A.weight", "model.norm.lora_A.weight", "lora_A"])
def test_what_the_model_does_not_name_as_a_matrix_is_left_to_the_engine(name: str) -> None:
    assert problems({name: (3, 5)}) == []


def test_adapters_of_models_with_transposed_weights_are_left_to_the_engine() -> None:
    assert problems({A: (4, 12), B: (8, 4)}, '{"fan_in_fan_out": true}') == []

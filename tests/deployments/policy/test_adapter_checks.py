"""Whether the matrices of an adapter fit the model."""

import json

import pytest

from deployments.policy.adapter_checks import adapter_problems, config_for_engines, names_for_engines
from deployments.policy.failures import WeightsRefused
from rollout_client.contract.policy import PolicyLayout, TensorLayout
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


EMBEDDING_A, EMBEDDING_B = f"{LAYER}.lora_embedding_A", f"{LAYER}.lora_embedding_B"
NO_MATRIX = "it is not a matrix of a LoRA adapter, as <module>.lora_A.weight is"
UNKNOWABLE = ("lm_head", "model.layers.0.mlp.experts.base_layer", "layers.0.self_attn.o_proj")
"""Modules of which the checkpoint says nothing: the engine judges them."""
OTHERS = ("lora_A", "base_model.model.lm_head.weight", f"{LAYER}.lora_magnitude_vector", f"{LAYER}.lora_A.bias")


ABSENT = (
    *("encoder.layers.0.self_attn.o_proj", "model.layers.99.self_attn.o_proj", "lm.layers.0.self_attn.o_proj"),
    "model.layers.0.mlp.o_proj",
)
ABSENT_NAMES = [(module, f"base_model.model.{module}.lora_{half}.weight") for module in ABSENT for half in "AB"]


def misfit(name: str, shape: str, taken: str) -> tuple[str, str]:
    return name, f"its shape is {shape}; {LAYER} takes {taken}"


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        ({A: (4, 8), B: (12, 4)}, []),
        ({A: (4, 7), B: (12, 4)}, [misfit(A, "[4, 7]", "[rank, 8]")]),
        ({A: (4, 8), B: (8, 4)}, [misfit(B, "[8, 4]", "[12, 4]")]),
        ({A: (4, 8), B: (12, 3)}, [misfit(B, "[12, 3]", "[12, 4]")]),
        ({A: (32,), B: (12, 32)}, [misfit(A, "[32]", "[rank, 8]")]),
        ({B: (11, 4)}, [(B, "there is no lora_A.weight beside it"), misfit(B, "[11, 4]", "[12, rank]")]),
        ({EMBEDDING_A: (4, 12), EMBEDDING_B: (8, 4)}, []),
        ({EMBEDDING_A: (4, 8), EMBEDDING_B: (8, 4)}, [misfit(EMBEDDING_A, "[4, 8]", "[rank, 12]")]),
        # What PEFT saves beside an adapter of embeddings.
        ({"base_model.model.model.embed_tokens.base_layer.weight": (3, 5)}, []),
        *(({f"{name}.lora_A.weight": (3, 5), f"{name}.lora_B.weight": (5, 3)}, []) for name in UNKNOWABLE),
        *(({name: (3, 5)}, [(name, NO_MATRIX)]) for name in OTHERS),
        (
            {name: (3, 3) for _, name in ABSENT_NAMES},
            [
                (name, f"the model has no module {module}; it has, for example, {LAYER}")
                for module, name in ABSENT_NAMES
            ],
        ),
    ],
)
def test_each_matrix_that_misfits_is_named(shapes: dict[str, tuple[int, ...]], found: list[tuple[str, str]]) -> None:
    assert problems(shapes) == found


@pytest.mark.parametrize(
    ("module", "served"),
    [
        (f"base_model.model.{LAYER}", f"base_model.model.{LAYER}"),
        (LAYER, LAYER),
        (f"base_model.model.module.{LAYER}", f"base_model.model.{LAYER}"),
        (f"module.base_model.model.{LAYER}", f"base_model.model.{LAYER}"),
        (f"base_model.model._orig_mod.{LAYER}", f"base_model.model.{LAYER}"),
        ("base_model.model.model.language_model.layers.0.self_attn.o_proj", f"base_model.model.{LAYER}"),
    ],
)
def test_matrices_of_wrapped_modules_are_those_of_their_layers(module: str, served: str) -> None:
    a, b = (f"{module}.lora_{half}.weight" for half in "AB")
    header = header_of((name, "F32", (4, 4)) for name in (a, b))
    assert [*names_for_engines(header, LAYOUT).values()] == [f"{served}.lora_{half}.weight" for half in "AB"]
    assert problems({a: (4, 7), b: (12, 4)}) == [(a, f"its shape is [4, 7]; {LAYER} takes [rank, 8]")]


def test_adapters_of_models_with_transposed_weights_are_left_to_the_engine() -> None:
    assert problems({A: (4, 12), B: (8, 4)}, '{"fan_in_fan_out": true}') == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "module", "served"),
    [
        (r"model\.layers\.(0|1)\.self_attn.o_proj", LAYER, f"model.language_model.{LAYER.removeprefix('model.')}"),
        (f"^{LAYER}", LAYER, f"model.language_model.{LAYER.removeprefix('model.')}"),
        (LAYER, LAYER, f"model.language_model.{LAYER.removeprefix('model.')}"),
        (r"module\.model\.layers\..*", f"module.{LAYER}", LAYER),
        ("o_proj", f"module.{LAYER}", LAYER),
        ("layers.1.self_attn.o_proj", f"module.{LAYER}", LAYER),
        ("experts.gate_up_proj", "module.model.layers.0.experts.base_layer", "model.layers.0.experts.base_layer"),
    ],
)
def test_engines_scale_a_renamed_module_as_peft_scaled_it(key: str, module: str, served: str) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    layout = PolicyLayout(tensors={f"{served}.weight": TensorLayout(dtype="F32", shape=[8, 8])})
    names = names_for_engines(
        header_of((f"base_model.model.{module}.lora_{half}.weight", "F32", (8, 8)) for half in "AB"), layout
    )
    assert list(names.values()) == [f"base_model.model.{served}.lora_{half}.weight" for half in "AB"]
    alphas = {"rank_pattern": {key: 2}, "alpha_pattern": {key: 64}}
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], **alphas}
    before = PEFTHelper.from_dict(config).get_rank_and_scaling(module)
    renamed = json.loads(config_for_engines(json.dumps(config), names))
    assert PEFTHelper.from_dict(renamed).get_rank_and_scaling(served) == before


@pytest.mark.slow
def test_a_key_that_takes_too_long_is_refused() -> None:
    module = f"model.layers.0.{'a' * 40}.o_proj"
    names = {f"module.{module}.lora_A.weight": f"{module}.lora_A.weight"}
    with pytest.raises(WeightsRefused, match=r"the key \(a\|a\)\+b takes longer than 1 s to be compared with module"):
        config_for_engines(json.dumps({"alpha_pattern": {"(a|a)+b": 1}}), names)

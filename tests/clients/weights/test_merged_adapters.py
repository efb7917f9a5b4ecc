"""Modules as PEFT wraps them: what is sent of them once their adapters are merged."""

import pytest
import torch
from torch import nn

from rollout_client.contract.policy import PolicyLayout
from rollout_client.weights.model_tensors import TorchTensor
from rollout_client.weights.torch_tensors import AdapterNotMerged, torch_tensors

LAYOUT = PolicyLayout(tensors={})


class AdaptedLinear(nn.Module):
    """Has the attributes of PEFT's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(1, 2, bias=False)})
        self.merged = False

    def merge(self) -> None:
        with torch.no_grad():
            self.base_layer.weight += self.lora_B["default"](self.lora_A["default"](torch.eye(2))).T
        self.merged = True


class SavedModule(nn.Module):
    """Has the attributes of PEFT's wrapper of a module that is trained as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.original_module = nn.Linear(2, 2).requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2)})
        self.active_adapters = ["default"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 2).requires_grad_(False)
        self.q_proj = AdaptedLinear()
        self.head = SavedModule()


class Wrapped(nn.Module):
    """As `PeftModel`, whose `base_model` is a tuner, whose `model` is the model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


@pytest.fixture
def model() -> Model:
    return Model()


def sent(module: nn.Module, is_partial: bool = False) -> dict[str, torch.Tensor]:
    tensors = torch_tensors(module, LAYOUT, is_partial)
    return {name: tensor.tensor for name, tensor in tensors.items() if isinstance(tensor, TorchTensor)}


@pytest.mark.parametrize("is_wrapped_by_ddp", [False, True])
def test_merged_weights_have_the_names_of_the_model_inside(model: Model, is_wrapped_by_ddp: bool) -> None:
    model.q_proj.merge()
    wrapped: nn.Module = Wrapped(model)
    tensors = sent(nn.ModuleDict({"module": wrapped}) if is_wrapped_by_ddp else wrapped)
    assert list(tensors) == ["embed.weight", "q_proj.weight", "q_proj.bias", "head.weight", "head.bias"]
    assert torch.equal(tensors["q_proj.weight"], model.q_proj.base_layer.weight)
    assert torch.equal(tensors["head.weight"], model.head.modules_to_save.get_parameter("default.weight"))


def test_a_model_that_holds_its_adapter_itself_is_sent_alike(model: Model) -> None:
    model.q_proj.merge()
    assert list(sent(model)) == list(sent(Wrapped(model)))


def test_of_partial_weights_what_was_merged_counts_as_trained(model: Model) -> None:
    model.q_proj.merge()
    assert list(sent(model, is_partial=True)) == ["q_proj.weight", "q_proj.bias", "head.weight", "head.bias"]


def test_an_adapter_that_is_not_merged_is_refused(model: Model) -> None:
    with pytest.raises(
        AdapterNotMerged, match=r"adapter of base_model\.model\.q_proj is not merged.*merge_adapter\(\)"
    ):
        sent(Wrapped(model))

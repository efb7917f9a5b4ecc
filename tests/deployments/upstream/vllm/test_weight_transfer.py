"""vLLM's reloads and transfers that end halfway, and a transfer backend that does not exist."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import WeightTransferConfig
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from deployments.upstream.vllm.weight_transfer import end_broken_reload, reject_unknown_backend

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


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


def test_a_reload_that_broke_off_must_still_be_ended() -> None:
    model = Pair()
    in_use = model.first
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    model.load(first=1.0)
    initialize_layerwise_reload(model)
    assert model.first is not in_use, "vLLM does it by itself: drop the patch"


def test_an_unknown_transfer_backend_is_refused() -> None:
    # Otherwise vLLM refuses it by itself: drop the check.
    config = WeightTransferConfig(backend="pigeon")
    arguments: Any = SimpleNamespace(weight_transfer_config=config)
    with pytest.raises(ValueError, match=r"'pigeon' does not exist; vLLM has .*nccl"):
        reject_unknown_backend(arguments)
    reject_unknown_backend(SimpleNamespace(weight_transfer_config=None))  # type: ignore[arg-type]

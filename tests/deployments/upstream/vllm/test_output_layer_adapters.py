"""The output layer, which takes no adapters."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def test_the_layer_stays_as_it_is() -> None:
    from deployments.upstream.vllm.plugin import _leave_output_layer_without_adapters

    manager: Any = SimpleNamespace()
    _leave_output_layer_without_adapters(manager)
    layer = object()
    assert manager.from_layer_logits_processor(layer, object(), 4, object(), None) is layer


def test_vllm_passes_over_a_layer_that_was_not_wrapped() -> None:
    from vllm.lora.model_manager import LoRAModelManager

    source = inspect.getsource(LoRAModelManager)
    made, passed_over = source.index("from_layer_logits_processor("), source.index("matched the ")
    assert made < passed_over, "vLLM does otherwise: read the code beside the patch"


def test_adapters_must_still_be_left_out() -> None:
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for compute in (vars(GPUModelRunner)["_get_prompt_logprobs_dict"], PromptLogprobsWorker.compute_prompt_logprobs):
        source = inspect.getsource(inspect.unwrap(compute))
        assert "lora" not in source.lower(), "vLLM knows of adapters here: try whether the patch can go"

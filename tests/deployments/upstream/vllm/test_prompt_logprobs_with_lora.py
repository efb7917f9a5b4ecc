"""Adapters of the output layer, which are added to no row of a prompt."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from deployments.upstream.vllm.prompt_logprobs_with_lora import PromptLogits, leave_out_head_adapters_of_prompts

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


class ScriptedPunica:
    """Adds 10 to the logits of each row."""

    def add_lora_logits(self, logits: torch.Tensor, *_weights: object) -> torch.Tensor:
        return logits.add_(10.0)


class ScriptedHead(LogitsProcessorWithLoRA):
    """vLLM's, with an output layer that leaves the hidden states as they are."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        as_they_are = SimpleNamespace(
            _apply_head=lambda _head, hidden, _bias: hidden.clone(), _gather_logits=lambda logits: logits, vocab_size=3
        )
        vars(self).update(base_layer=as_they_are, punica_wrapper=ScriptedPunica(), sharded_to_full_mapping_gpu=None)
        vars(self).update(lora_a_stacked=None, lora_b_stacked=None)

    def compute(self, hidden: torch.Tensor) -> list[list[float]]:
        logits = self._get_logits(hidden, SimpleNamespace())  # type: ignore[arg-type]
        assert logits is not None
        return logits.tolist()


def test_adapters_of_the_output_layer_are_added_to_tokens_to_be_generated_and_to_no_row_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ScriptedHead, "_get_logits", LogitsProcessorWithLoRA._get_logits, raising=False)

    class Runner:
        def load_lora_model(self, model: ScriptedHead) -> ScriptedHead:
            self.model = model
            return model

        def _get_prompt_logprobs_dict(self, hidden: torch.Tensor) -> list[list[float]]:
            return self.model.compute(hidden)

    for _ in range(2):
        leave_out_head_adapters_of_prompts(Runner, ScriptedHead)
    runner, of_two_rows = Runner(), torch.ones(2, 3)
    head = runner.load_lora_model(ScriptedHead())
    assert head.compute(of_two_rows) == [[11.0] * 3] * 2
    assert runner._get_prompt_logprobs_dict(of_two_rows) == [[1.0] * 3] * 2
    assert head.compute(of_two_rows) == [[11.0] * 3] * 2


def test_the_rows_of_prompts_are_known_in_vllms_newer_model_runner_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[bool]()

    def compute(_self: PromptLogprobsWorker) -> None:
        said.append(PromptLogits.are_computed)

    names = ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs")
    for name in names:
        monkeypatch.setattr(PromptLogprobsWorker, name, compute)

    class Runner:
        def load_lora_model(self) -> None:
            """Loads nothing."""

    leave_out_head_adapters_of_prompts(Runner, type("Head", (), {"_get_logits": None}))
    Runner().load_lora_model()
    worker: Any = object.__new__(PromptLogprobsWorker)
    for name in names:
        getattr(worker, name)()
    assert (said, PromptLogits.are_computed) == ([True, True], False)


@pytest.mark.parametrize(
    "compute", [GPUModelRunner._get_prompt_logprobs_dict, PromptLogprobsWorker.compute_prompt_logprobs]
)
def test_adapters_must_still_be_left_out(compute: Any) -> None:
    source = inspect.getsource(inspect.unwrap(compute))
    assert "lora" not in source.lower(), "vLLM knows of adapters here: try whether the patch can go"

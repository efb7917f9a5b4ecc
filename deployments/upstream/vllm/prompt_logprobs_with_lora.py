"""Log-probabilities of prompts in an engine with LoRA adapters.

vLLM knows which adapter belongs to each token to be generated, and takes the rows of a prompt for such: it adds the
adapters of other rollouts' output layers to them, or dies of the different number of rows.

Model runners: V1 and V2, which compute the logits of prompts in different places.

Needed with vLLM 0.32; no upstream issue is known. The test of the adapters of the output layer fails when vLLM leaves
them out by itself.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PromptLogits:
    """Whether the model runner of this process computes logits of prompts, and not of the tokens to be generated."""

    are_computed = False

    @classmethod
    @contextmanager
    def computed(cls) -> Iterator[None]:
        """For the length of the block they are."""
        cls.are_computed = True
        try:
            yield
        finally:
            cls.are_computed = False


class _NoAdapters:
    """In the place of vLLM's wrapper of the adapters' operations, where nothing is to be added."""

    def add_lora_logits(self, logits: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
        return logits


def leave_out_head_adapters_of_prompts(runner: type[Any], logits_processor: type[Any]) -> None:
    """Lets an engine with LoRA compute the log-probabilities of prompts.

    Adapters that change the output layer are not scored with (`deployments/generation/engine.py`); others add nothing
    to the logits.

    Args:
        runner: vLLM's `LoRAModelRunnerMixin`, of which all model runners are.
        logits_processor: vLLM's `LogitsProcessorWithLoRA`.
    """
    if getattr(runner.load_lora_model, "leaves_out_prompts", False):
        return
    load_lora_model, get_logits = runner.load_lora_model, logits_processor._get_logits

    @functools.wraps(load_lora_model)
    def load_and_mark(self: Any, *arguments: Any, **options: Any) -> Any:
        owner, names = _where_prompts_are_computed(self)
        for name in names:
            setattr(owner, name, _marking_prompts(getattr(owner, name)))
        return load_lora_model(self, *arguments, **options)

    @functools.wraps(get_logits)
    def get_logits_of_tokens(self: Any, *arguments: Any, **options: Any) -> Any:
        if not PromptLogits.are_computed:
            return get_logits(self, *arguments, **options)
        adapters, self.punica_wrapper = self.punica_wrapper, _NoAdapters()
        try:
            return get_logits(self, *arguments, **options)
        finally:
            self.punica_wrapper = adapters

    load_and_mark.leaves_out_prompts = True  # type: ignore[attr-defined]
    runner.load_lora_model, logits_processor._get_logits = load_and_mark, get_logits_of_tokens


def _where_prompts_are_computed(runner: Any) -> tuple[Any, tuple[str, ...]]:
    """The object whose methods compute the logits of prompts, and their names: vLLM has two kinds of model runners."""
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        return runner, ("_get_prompt_logprobs_dict",)
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    return PromptLogprobsWorker, ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs")


def _marking_prompts(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def compute_marked(*arguments: Any, **options: Any) -> Any:
        with PromptLogits.computed():
            return compute(*arguments, **options)

    return compute_marked

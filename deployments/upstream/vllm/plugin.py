"""vLLM calls `install` in each of its processes before it configures the engine (entry point `vllm.general_plugins`).

It names the engine's shared memory by the replica, lets the engine's processes end with the replica, and works around
two faults of vLLM and four of its build for processors.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deployments.workers.cleanup import die_with_parent, name_by_owner

OPENMP_LIBRARIES = ("libgomp", "libiomp", "libomp")
ADAPTER_OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
"""All others of vLLM's build for processors call these."""


def install() -> None:
    """May be called more than once."""
    die_with_parent()
    name_by_owner()
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    keep_top_logprobs_beside_scores(Sampler)
    leave_out_head_adapters_of_prompts(LoRAModelRunnerMixin, LogitsProcessorWithLoRA)
    if not current_platform.is_cpu():
        return
    allow_amx_tiles()
    for library in sorted(Path(torch.__file__).parent.glob("lib/libgomp.so*")):
        preload_by_name(library, os.environ)
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in (lora_ops, punica_cpu):
        keep_adapters_from_tokens_without(module)
    pack_experts_at_each_load(UnquantizedFusedMoEMethod)


def allow_amx_tiles() -> None:
    """Asks Linux for the tile registers of AMX.

    Linux kills a process with SIGILL that uses them without having asked; vLLM's bf16 attention kernel does not ask.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def keep_adapters_from_tokens_without(module: ModuleType) -> None:
    """Lets tokens of the plain weights stay as they are in a batch beside tokens of adapters.

    vLLM marks a token without an adapter by the index -1, and takes this index for the last adapter
    (vllm-project/vllm#48421).
    """
    for name in ADAPTER_OPERATIONS:
        setattr(module, name, for_tokens_with_an_adapter(getattr(module, name)))


def for_tokens_with_an_adapter(operation: Callable[..., None]) -> Callable[..., None]:
    """`operation`, with zeros as the inputs of tokens whose index is -1: an adapter adds nothing to those."""
    if getattr(operation, "leaves_out_other_tokens", False):
        return operation

    @functools.wraps(operation)
    def on_tokens_with_an_adapter(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *sizes: Any,
        **options: Any,
    ) -> None:
        operation(inputs.masked_fill(indices.unsqueeze(1) < 0, 0), weights, output, indices, *sizes, **options)

    on_tokens_with_an_adapter.leaves_out_other_tokens = True  # type: ignore[attr-defined]
    return on_tokens_with_an_adapter


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


class NoAdapters:
    """In the place of vLLM's wrapper of the adapters' operations, where nothing is to be added."""

    def add_lora_logits(self, logits: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
        return logits


def leave_out_head_adapters_of_prompts(runner: type[Any], logits_processor: type[Any]) -> None:
    """Lets an engine with LoRA compute the log-probabilities of prompts.

    vLLM knows which adapter belongs to each token to be generated, and takes the rows of a prompt for such: it adds the
    adapters of other rollouts' output layers to them, or dies of the different number of rows. Adapters that change the
    output layer are not scored with (`deployments/generation/engine.py`); others add nothing to the logits.

    Args:
        runner: vLLM's `LoRAModelRunnerMixin`, of which all model runners are.
        logits_processor: vLLM's `LogitsProcessorWithLoRA`.
    """
    if getattr(runner.load_lora_model, "leaves_out_prompts", False):
        return
    load_lora_model, get_logits = runner.load_lora_model, logits_processor._get_logits

    @functools.wraps(load_lora_model)
    def load_and_mark(self: Any, *arguments: Any, **options: Any) -> Any:
        owner, names = where_prompts_are_computed(self)
        for name in names:
            setattr(owner, name, marking_prompts(getattr(owner, name)))
        return load_lora_model(self, *arguments, **options)

    @functools.wraps(get_logits)
    def get_logits_of_tokens(self: Any, *arguments: Any, **options: Any) -> Any:
        if not PromptLogits.are_computed:
            return get_logits(self, *arguments, **options)
        adapters, self.punica_wrapper = self.punica_wrapper, NoAdapters()
        try:
            return get_logits(self, *arguments, **options)
        finally:
            self.punica_wrapper = adapters

    load_and_mark.leaves_out_prompts = True  # type: ignore[attr-defined]
    runner.load_lora_model, logits_processor._get_logits = load_and_mark, get_logits_of_tokens


def where_prompts_are_computed(runner: Any) -> tuple[Any, tuple[str, ...]]:
    """The object whose methods compute the logits of prompts, and their names: vLLM has two kinds of model runners."""
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        return runner, ("_get_prompt_logprobs_dict",)
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    return PromptLogprobsWorker, ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs")


def marking_prompts(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def compute_marked(*arguments: Any, **options: Any) -> Any:
        with PromptLogits.computed():
            return compute(*arguments, **options)

    return compute_marked


def keep_top_logprobs_beside_scores(sampler: type[Any]) -> None:
    """Lets a call that asks for the most probable tokens have them in a step beside the score of a whole context.

    Where one request of a step names the tokens whose log-probabilities it wants, as such a score does for the last
    token, vLLM computes those alone: all others get the token 0 in place of the most probable ones.

    Args:
        sampler: vLLM's `Sampler`.
    """
    if getattr(sampler.forward, "keeps_top_logprobs", False):
        return
    forward, gather_named = sampler.forward, sampler.gather_specific_token_logprobs

    @functools.wraps(forward)
    def forward_noting_how_many(
        self: Any, logits: torch.Tensor, sampling_metadata: Any, *arguments: Any, **options: Any
    ) -> Any:
        self.most_top_logprobs = sampling_metadata.max_num_logprobs
        return forward(self, logits, sampling_metadata, *arguments, **options)

    @functools.wraps(gather_named)
    def gather_for_each(self: Any, logprobs: torch.Tensor, named: dict[int, list[int]], sampled: torch.Tensor) -> Any:
        gathered = gather_named(self, logprobs, named, sampled)
        if gathered is None or (self.most_top_logprobs or 0) <= 0:
            return gathered
        return joined_rows(gathered, self.gather_logprobs(logprobs, self.most_top_logprobs, token_ids=sampled), named)

    forward_noting_how_many.keeps_top_logprobs = True  # type: ignore[attr-defined]
    sampler.forward, sampler.gather_specific_token_logprobs = forward_noting_how_many, gather_for_each


def joined_rows(named: Any, top: Any, rows: Iterable[int]) -> Any:
    """vLLM's `LogprobsTensors` with these `rows` of `named` and all others of `top`, as wide as the wider one."""
    width = max(named.logprobs.shape[1], top.logprobs.shape[1])
    is_named = torch.zeros(len(named.logprobs), 1, dtype=torch.bool)
    is_named[list(rows)] = True
    is_named = is_named.to(named.logprobs.device)

    def widened(values: torch.Tensor, nothing: float) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=nothing)

    def joined(of_named: torch.Tensor, of_top: torch.Tensor, nothing: float) -> torch.Tensor:
        return torch.where(is_named, widened(of_named, nothing), widened(of_top, nothing))

    return named._replace(
        logprob_token_ids=joined(named.logprob_token_ids, top.logprob_token_ids, 0),
        logprobs=joined(named.logprobs, top.logprobs, -torch.inf),
    )


def pack_experts_at_each_load(experts_method: type[Any]) -> None:
    """Lets the experts of a mixture be loaded again.

    vLLM packs their weights for its kernel at the first load only: after a reload the kernel would take unpacked values
    for packed ones.
    """
    setup_kernel = experts_method._setup_kernel
    if getattr(setup_kernel, "packs_at_each_load", False):
        return

    def setup_and_pack(self: Any, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_packed_by_vllm = self.moe_kernel is None
        setup_kernel(self, layer, w13, w2)
        if not is_packed_by_vllm:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_and_pack.packs_at_each_load = True  # type: ignore[attr-defined]
    experts_method._setup_kernel = setup_and_pack


def preload_by_name(library: Path, environment: MutableMapping[str, str]) -> None:
    """Names torch's OpenMP library in LD_PRELOAD without its folder, if the folder's name contains a space.

    vLLM puts the whole path there, unless an OpenMP library is named there already. The dynamic linker splits it at the
    space: every process that is started afterwards writes errors to stderr, and the engine's threads share one core. A
    library without a folder is searched in LD_LIBRARY_PATH, which is not split at spaces.
    """
    preloaded = environment.get("LD_PRELOAD", "")
    has_space = any(map(str.isspace, str(library)))
    if not has_space or any(name in preloaded for name in OPENMP_LIBRARIES):
        return
    environment["LD_PRELOAD"] = ":".join(filter(None, (preloaded, library.name)))
    searched = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(library.parent), searched)))

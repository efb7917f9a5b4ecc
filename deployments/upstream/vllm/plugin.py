"""The patches of vLLM: those of the engine's processes, and those of the process that runs its servers.

Those of log-probabilities are here, of steps that serve unlike requests.

Where one request of a step names the tokens whose log-probabilities it wants, as such a score does for the last token,
vLLM computes those alone: all others get the token 0 in place of the most probable ones.

Model runners: V1, that of processors. V2, that of GPUs, keeps the tokens of each request apart by itself.

vLLM knows which adapter belongs to each token to be generated, and takes the rows of a prompt for such: with an output
layer that takes adapters it adds those of other rollouts to a prompt's log-probabilities, or dies of the different
number of rows. So the engine does not take adapters of the output layer.

With drafts, vLLM takes log-probabilities of tokens that a request names for those of all, and dies: such requests are
refused.

Model runners: V1 and V2.

All are needed with vLLM 0.32; no upstream issue is known.
"""

import functools
import gc
from collections.abc import Iterable
from multiprocessing import current_process
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from deployments.upstream.vllm import cpu_build
from deployments.workers.cleanup import die_with_parent, name_by_owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel


def install() -> None:
    """Installs the patches of the engine. May be called more than once.

    vLLM calls it in each of its processes before it configures the engine (entry point `vllm.general_plugins`).
    """
    die_with_parent()
    name_by_owner()
    pass_collector_on()
    from vllm.lora import model_manager
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.sampler import Sampler

    _keep_top_logprobs_beside_scores(Sampler)
    _leave_output_layer_without_adapters(model_manager)
    _refuse_named_tokens_beside_drafts(SamplingParams)
    if current_platform.is_cpu():
        cpu_build.install()


def _refuse_named_tokens_beside_drafts(params: type[Any]) -> None:
    """Patches vLLM's `SamplingParams`, which takes `logprob_token_ids` that kill an engine that drafts."""
    validate = params._validate_spec_decode
    if hasattr(validate, "__wrapped__"):
        return

    @functools.wraps(validate)
    def validate_and_refuse(self: Any, speculative_config: Any) -> None:
        validate(self, speculative_config)
        if speculative_config is not None and self.logprob_token_ids:
            raise ValueError("logprob_token_ids are not supported with speculative decoding: leave them out.")

    params._validate_spec_decode = validate_and_refuse


class _Collector:
    """Becomes a call of `gc.set_threshold` where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return gc.set_threshold, gc.get_threshold()


def pass_collector_on() -> None:
    """Has processes that this one spawns collect garbage as seldom as it does, from before they import the engine."""
    process: Any = current_process()
    process._config["collector"] = _Collector()  # Unpickled before what the process is to call.


def install_in_servers(requests: "Sequence[type[BaseModel]]", with_messages: "Sequence[type[BaseModel]]") -> None:
    """Installs the patches of vLLM's servers before their routes are made. May be called more than once.

    Args:
        requests: the classes of all requests that they take.
        with_messages: those whose messages are OpenAI's.
    """
    from deployments.upstream.vllm.request_validation import fail_at_first_wrong_item, take_null_fields_of_messages

    fail_at_first_wrong_item(*requests)
    take_null_fields_of_messages(*with_messages)


def _keep_top_logprobs_beside_scores(sampler: type[Any]) -> None:
    """Patches vLLM's `Sampler`. May be called more than once."""
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
        return _joined_rows(gathered, self.gather_logprobs(logprobs, self.most_top_logprobs, token_ids=sampled), named)

    forward_noting_how_many.keeps_top_logprobs = True  # type: ignore[attr-defined]
    sampler.forward, sampler.gather_specific_token_logprobs = forward_noting_how_many, gather_for_each


def _joined_rows(named: Any, top: Any, rows: Iterable[int]) -> Any:
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


def _leave_output_layer_without_adapters(manager: ModuleType) -> None:
    """Patches vLLM's `vllm.lora.model_manager`, which passes over a layer that was not wrapped."""
    of_manager: Any = manager
    of_manager.from_layer_logits_processor = _unwrapped


def _unwrapped(layer: Any, *_arguments: Any) -> Any:
    return layer

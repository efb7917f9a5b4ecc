"""The patches of vLLM: those of the engine's processes, and those of the process that runs its servers."""

from typing import TYPE_CHECKING

from deployments.upstream.vllm import cpu_adapters, cpu_build
from deployments.upstream.vllm.logprobs import keep_top_logprobs_beside_scores, leave_output_layer_without_adapters
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
    from vllm.lora import model_manager
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler

    keep_top_logprobs_beside_scores(Sampler)
    leave_output_layer_without_adapters(model_manager)
    if current_platform.is_cpu():
        cpu_build.install()
        cpu_adapters.install()


def install_in_servers(requests: "Sequence[type[BaseModel]]", with_messages: "Sequence[type[BaseModel]]") -> None:
    """Installs the patches of vLLM's servers before their routes are made. May be called more than once.

    Args:
        requests: the classes of all requests that they take.
        with_messages: those whose messages are OpenAI's.
    """
    from deployments.upstream.vllm.request_validation import fail_at_first_wrong_item, take_null_fields_of_messages

    fail_at_first_wrong_item(*requests)
    take_null_fields_of_messages(*with_messages)

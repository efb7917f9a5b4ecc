"""What a session writes into the requests of its calls before vLLM's layers read them."""

from typing import Any

from vllm.exceptions import VLLMValidationError

from deployments.generation.serving.served_call import ServedCall
from deployments.seeds import derived_seed
from rollout_client.contract import Sampling


def prepare_chat(request: Any, call: ServedCall) -> None:
    """Args: `request` is vLLM's `ChatCompletionRequest`. Raises `VLLMValidationError`."""
    if request.use_beam_search:
        raise VLLMValidationError("A session records samples, not beams.", parameter="use_beam_search")
    given = request.model_fields_set
    length = "max_completion_tokens"
    fill(request, call, length, has_length=bool(given & {"max_tokens", "max_completion_tokens"}))


def prepare_responses(request: Any, call: ServedCall) -> None:
    """Args: `request` is vLLM's `ResponsesRequest`. Raises `VLLMValidationError`."""
    if request.background or request.previous_response_id is not None:
        field = "background" if request.background else "previous_response_id"
        message = f"A session takes no `{field}`: send the items of the conversation."
        raise VLLMValidationError(message, parameter=field)
    fill(request, call, "max_output_tokens", has_length="max_output_tokens" in request.model_fields_set)


def fill(request: Any, call: ServedCall, length: str, has_length: bool) -> None:
    """Fills in the fields of sampling that the caller left out, and lets any name stand for the model.

    vLLM's own defaults are those of the model's generation config; rollouts have none of these.
    """
    request.model = None
    sampling = call.request.session_sampling or Sampling()
    defaults: dict[str, Any] = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop_strings),
        "ignore_eos": sampling.ignore_eos,
    }
    given = request.model_fields_set
    given_seed: int | None = request.seed
    if given_seed is not None and call.request.generation_index:
        # The same program plays each session of a group: with equal seeds they would be equal.
        request.seed = derived_seed(given_seed, call.request.generation_index)
    for name, value in defaults.items():
        if name in type(request).model_fields and (name not in given or getattr(request, name) is None):
            setattr(request, name, value)
    if not has_length and sampling.max_new_tokens is not None:
        setattr(request, length, sampling.max_new_tokens)

"""Log-probabilities by transformers, to hold the service's against."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout_client.contract.rollouts import SampleResult
from tests.paths import TINY_MODEL

State = dict[str, torch.Tensor]
TOLD_APART = 1.0
"""Of two log-probabilities of a token: those of 5% of the tokens by two perturbed models are farther apart. bfloat16
rounds most by less than 0.06; of ten thousands, one was off by 0.25."""


def tiny_state() -> State:
    return load_file(TINY_MODEL / "model.safetensors")


def perturbed(seed: int, scale: float = 0.1) -> State:
    """The embedded model's weights, each changed by about `scale` of itself; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() * (1 + scale * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in tiny_state().items()
    }


def model_of(state: State) -> Any:
    """A transformers model in bfloat16 with these weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.bfloat16)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


def logprob_differences(
    results: Iterable[SampleResult], models: Mapping[str, Any], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """By version: for each token the difference (absolute) between what the service and what `models[version]` says."""
    differences: dict[str, list[torch.Tensor]] = {version: [] for version in models}
    for result in results:
        ids = torch.tensor([token_id for message in result.message_log for token_id in message.token_ids])
        spoken: dict[str, torch.Tensor] = {}
        position = 0
        for message in result.message_log:
            for span in message.weight_versions or ():
                if span.version not in spoken:
                    spoken[span.version] = logprobs_of_next(models[span.version], ids, temperature)
                places = torch.arange(position + span.start, position + span.end)
                said = torch.tensor((message.generation_logprobs or [])[span.start : span.end])
                recomputed = spoken[span.version][places - 1, ids[places]]
                differences[span.version].append((recomputed - said).abs())
            position += len(message.token_ids)
    return {version: torch.cat(found) if found else torch.empty(0) for version, found in differences.items()}


def of_other_weights(results: Iterable[SampleResult], models: Mapping[str, Any], temperature: float = 1.0) -> int:
    """How many tokens are clearly of other weights than the version that they are labelled with says.

    Of a token whose log-probabilities by the models differ by more than `TOLD_APART`, the one that the service says
    must be nearest to that of its version. A mean over thousands of tokens does not show a span that ends one too late.
    """
    count = 0
    for result in results:
        ids = torch.tensor([token_id for message in result.message_log for token_id in message.token_ids])
        by_model = {version: logprobs_of_next(model, ids, temperature) for version, model in models.items()}
        position = 0
        for message in result.message_log:
            for span in message.weight_versions or ():
                places = torch.arange(position + span.start, position + span.end)
                said = torch.tensor((message.generation_logprobs or [])[span.start : span.end])
                own = by_model[span.version][places - 1, ids[places]]
                for version in models.keys() - {span.version}:
                    other = by_model[version][places - 1, ids[places]]
                    is_other = ((own - other).abs() > TOLD_APART) & ((said - other).abs() < (said - own).abs())
                    count += int(is_other.sum())
            position += len(message.token_ids)
    return count


def logprobs_of_next(model: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[len(ids), vocabulary]: at each place, of the token that follows."""
    with torch.inference_mode():
        return torch.log_softmax(model(ids[None]).logits[0].float() / temperature, dim=-1)

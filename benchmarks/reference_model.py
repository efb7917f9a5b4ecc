"""Weights that are made here, and the log-probabilities of transformers, to hold the service's against."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rollout_client.contract.rollouts import SampleResult

State = dict[str, torch.Tensor]


def perturbed(state: State, seed: int, scale: float = 0.1) -> State:
    """Each value changed by about `scale` of itself; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() * (1 + scale * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in state.items()
    }


def write_adapter(
    folder: Path,
    base: State,
    targets: Sequence[str],
    seed: int,
    rank: int = 4,
    scale: float = 0.22,
    prefix: str = "base_model.model.",
    **config: Any,
) -> State:
    """Writes a LoRA adapter as PEFT does; returns what it adds to `base`, the shapes of whose matrices it has.

    Args:
        targets: last names of the modules that it changes.
        scale: of the second matrices, which are zero in a fresh adapter. The first ones have about the length 1 a row.
        config: further fields of `adapter_config.json`.
    """
    generator = torch.Generator().manual_seed(seed)
    adapter: State = {}
    added: State = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(targets)):
            continue
        rows, columns = tensor.shape
        a = columns**-0.5 * torch.randn(rank, columns, generator=generator)
        b = scale * torch.randn(rows, rank, generator=generator)
        adapter |= {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}
        added[name] = b @ a
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    config |= {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*targets], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


def merged(base: State, added: State) -> State:
    """The weights of a policy: `base`, and what its adapter adds to them."""
    return {name: (tensor.float() + added.get(name, 0)).to(tensor.dtype) for name, tensor in base.items()}


def model_of(folder: Path, state: State | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """transformers' model of a checkpoint, with other weights if they are given."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if state is not None:
        load(model, state)
    return model.eval()


def load(model: Any, state: State) -> None:
    model.load_state_dict(state, strict=False)
    model.tie_weights()


def logprobs_of_next(model: Any, ids: Sequence[int] | torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[len(ids), vocabulary]: at each place, of the token that follows."""
    with torch.inference_mode():
        logits = model(torch.as_tensor(ids, device=model.device)[None]).logits[0].float()
        return torch.log_softmax(logits / temperature, dim=-1).cpu()


def logprobs_of(model: Any, ids: Sequence[int] | torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[len(ids) - 1]: of each token but the first, after those before it."""
    return chosen(logprobs_of_next(model, ids, temperature), ids)


def chosen(logprobs: torch.Tensor, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Of each token but the first, in what `logprobs_of_next` returns."""
    return logprobs[:-1].gather(1, torch.as_tensor(ids)[1:, None])[:, 0]


class SpokenSpan(NamedTuple):
    """Tokens that one version has generated in a row."""

    version: str
    places: slice
    """Into what `logprobs_of` returns for the whole rollout."""
    logprobs: torch.Tensor
    """As the service says."""


def token_ids_of(result: SampleResult) -> list[int]:
    return [token_id for message in result.message_log for token_id in message.token_ids]


def spans_of(result: SampleResult) -> Iterator[SpokenSpan]:
    first = -1
    for message in result.message_log:
        for span in message.weight_versions or ():
            said = torch.tensor(list(message.generation_logprobs or ())[span.start : span.end])
            yield SpokenSpan(span.version, slice(first + span.start, first + span.end), said)
        first += len(message.token_ids)


def differences(
    results: Iterable[SampleResult], models: Mapping[str, Any], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """By version: of each token, the service's log-probability less that of `models[version]`."""
    found = {version: [torch.empty(0)] for version in models}
    for result in results:
        ids = token_ids_of(result)
        spans = list(spans_of(result))
        expected = {version: logprobs_of(models[version], ids, temperature) for version in {each[0] for each in spans}}
        for version, places, said in spans:
            found[version].append(said - expected[version][places])
    return {version: torch.cat(each) for version, each in found.items()}

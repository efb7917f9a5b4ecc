"""What `include` adds to the tokens, by a random mixture of experts behind the service, against transformers."""

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.gpu_check.configs import Machine, running_service
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import LOGIT_DEVIATION, write_tokenizer
from rollout_client import RolloutClient, Sampling
from rollout_client.tensors import RolloutTensors, logprobs_within, to_tensors

SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SMALL_SHAPE = SHAPE | {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
MEAN_TOLERANCE = 0.05
SAME_EXPERTS = 0.9
"""Rounding exchanges experts that are about as likely."""
TOP = 4
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"top_k": 20},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.2},
)
ROUNDS = 3


def check(machine: Machine, findings: Findings) -> None:
    on_card = machine.device == "gpu"
    # vLLM returns experts from its GPU runner alone.
    experts = on_card or os.environ.get("GPU_RUNNER_RIG") == "1"
    folder = machine.folder / "model"
    model = write_mixture(folder, SHAPE if on_card else SMALL_SHAPE).to(machine.torch_device)
    engine = machine.engine(folder, max_model_len=2048, enable_return_routed_experts=experts)
    with running_service(machine.served(engine), findings) as (_, client):
        for sampling in SAMPLINGS:
            name = f"{sampling}: columns against transformers"
            with findings.attempt(name):
                held, figures = compared(client, model, sampling, experts)
                findings.add(name, held, **figures)
        if experts:
            with findings.attempt("cost of experts"):
                findings.add("tokens/s, in Arrow", None, **costs(client, 256 if on_card else 4, 256 if on_card else 16))


def write_mixture(folder: Path, shape: dict[str, Any]) -> Any:
    write_tokenizer(folder, shape["vocab_size"])
    config = Qwen3MoeConfig(**shape, eos_token_id=shape["vocab_size"] - 1, bos_token_id=None, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * noise)
            else:
                scale = LOGIT_DEVIATION if "embed_tokens" in name else 1.0
                parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def compared(client: RolloutClient, model: Any, sampling: dict[str, Any], experts: bool) -> tuple[bool, dict[str, Any]]:
    include = [f"top_logprobs:{TOP}", "sampling_mask", "entropy", *(["routed_experts"] if experts else [])]
    samples = client.example_samples("math", 8, seed=5)
    options = Sampling(max_new_tokens=64, ignore_eos=True, seed=1, **sampling)
    tensors = to_tensors(client.rollout_arrow(samples, sampling=options, include=include), pad_token_id=0)
    with torch.inference_mode():
        made = model(
            tensors.input_ids.to(model.device),
            attention_mask=tensors.attention_mask.to(model.device),
            output_router_logits=experts,
        )
    # Logits before each token; nothing comes before the first one.
    logits = made.logits.float().cpu().roll(1, dims=1)
    generated = tensors.loss_mask.bool()
    mask = tensors.included["sampling_mask"]
    by_trainer = logprobs_within(logits, tensors.input_ids, mask)
    far = (by_trainer - tensors.generation_logprobs)[generated].abs()
    top_ids = tensors.included["top_token_ids"].long()
    by_top = torch.stack([logprobs_within(logits, top_ids[..., place], mask) for place in range(TOP)], dim=-1)
    top_far = (by_top - tensors.included["top_logprobs"])[generated].abs()
    top_far = top_far[tensors.included["top_logprobs"][generated].isfinite()]
    probabilities = by_top.exp()
    figures: dict[str, Any] = {
        "tokens": int(generated.sum()),
        "mean": round(far.mean().item(), 4),
        "largest": round(far.max().item(), 4),
        "top_mean": round(top_far.mean().item(), 4),
        "mean_entropy": round(tensors.included["entropy"][generated].mean().item(), 3),
        "top_mass": round(probabilities.sum(-1)[generated].mean().item(), 3),
        "mask": round((mask != -1).sum(-1)[generated].float().mean().item(), 1),
    }
    held = figures["mean"] <= MEAN_TOLERANCE and figures["top_mean"] <= MEAN_TOLERANCE
    if experts:
        figures["same_experts"] = round(same_experts(made.router_logits, tensors), 4)
        held &= figures["same_experts"] >= SAME_EXPERTS
    return held, figures


def same_experts(router_logits: Any, tensors: RolloutTensors) -> float:
    """The share of the experts of all tokens with a row that transformers chooses too."""
    rows = tensors.included["routed_experts"].long()
    batch, length, _, chosen = rows.shape
    # The experts of a token differ: a row of zeros is none.
    has_row = rows.flatten(2).any(-1)
    expected = torch.stack([layer.view(batch, length, -1).topk(chosen).indices for layer in router_logits], dim=2).cpu()
    same = (rows[..., None] == expected[..., None, :]).any(-1)
    return float(same[has_row].float().mean())


def costs(client: RolloutClient, samples: int, new_tokens: int) -> dict[str, Any]:
    measured: dict[str, list[float]] = {"nothing": [], "routed_experts": []}
    sampling = Sampling(max_new_tokens=new_tokens, ignore_eos=True)
    prompts = client.example_samples("math", samples, seed=6)
    for _ in range(ROUNDS):
        for include, seconds in measured.items():
            began = time.monotonic()
            client.rollout_arrow(
                prompts, sampling=sampling, include=None if include == "nothing" else ["routed_experts"]
            )
            seconds.append(time.monotonic() - began)
    return {name: round(samples * new_tokens / median(seconds)) for name, seconds in measured.items()}

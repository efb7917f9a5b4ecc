"""TRL's `AsyncGRPOTrainer`, as TRL has it, trains on a running service, which it takes for one vLLM server.

    python -m examples.train_async_grpo http://127.0.0.1:8000 /data/adapters

Learn from it what to give TRL: the address, the model as the service's config names it, and a folder that both can
read. The config needs `trainers: {}`, `enable_lora`, `max_lora_rank`, `max_loras` of `--max-staleness` + 2 or more, and
the folder among `policy.checkpoint_roots`. On processors TRL's attention kernel, which needs a GPU, is replaced.
"""

# mypy: disable-error-code="no-untyped-call"

import argparse
import json
import re
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from examples.train import additions
from rollout_client import RolloutClient, Sampling
from service.startup.generated_config import EMBEDDED_MODEL

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
"""Tells TRL how the model's chat template writes a message; TRL knows those of larger models itself."""
MAX_NEW_TOKENS = 24


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("url", help="The service.")
    add("folder", type=Path, help="Where TRL writes its adapters; the service reads them there.")
    add("--model", default=str(EMBEDDED_MODEL), help="Folder of the model, as `engine.model` of the config.")
    add("--steps", type=int, default=240, help="Of the optimizer; the service gets an adapter after each.")
    add("--max-staleness", type=int, default=2, help="Steps that a rollout may be older than the trainer.")
    add("--learning-rate", type=float, default=1e-3, help="Of what is trained.")
    add("--batch-size", type=int, default=256, help="Rollouts of a step, eight of each question.")
    add("--all-weights", action="store_true", help="Train the model, which TRL sends by NCCL, in place of an adapter.")
    return parser


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Trains an adapter on additions; returns what TRL has logged."""
    with warnings.catch_warnings():
        # TRL names the releases of vLLM that it supports.
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import async_grpo_trainer, packing
        from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # The engine computes beside it.
        vars(packing)["_flash_attn"] = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
        vars(async_grpo_trainer)["get_peak_flops_per_device"] = lambda *_: None
    questions, _ = additions()
    rows = [{"prompt": row["messages"], "answer": row["extra_env_info"]["ground_truth"]} for row in questions]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.response_template = RESPONSE_TEMPLATE
    trainer = async_grpo_trainer.AsyncGRPOTrainer(
        options.model,
        reward_funcs=is_right,
        args=AsyncGRPOConfig(
            output_dir=str(options.folder),
            vllm_server_base_url=options.url,
            max_steps=options.steps,
            max_staleness=options.max_staleness,
            token_budget=0,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=1,
            num_generations=8,
            max_completion_length=MAX_NEW_TOKENS,
            learning_rate=options.learning_rate,
            max_inflight_tasks=options.batch_size,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=None if options.all_weights else LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    return [logged for logged in trainer.state.log_history if "reward" in logged]


def is_right(completions: list[Any], answer: list[str], **_row: Any) -> list[float]:
    """1 where the last number of the reply is the answer."""
    numbers = (re.findall(r"\d+", completion[-1]["content"]) for completion in completions)
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


def attention(
    query: Any, key: Any, value: Any, queries: Any, keys: Any, *_lengths: int, softmax_scale: float, **_options: Any
) -> torch.Tensor:
    """The CUDA kernel of TRL's tree attention, written out: each segment attends to its own path, causally."""
    attended = []
    for (start, end), (first, last) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        before = (last - first) - (end - start)
        unseen = ~torch.ones(end - start, last - first, dtype=torch.bool).tril(before)
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[first:last]) * softmax_scale
        shares = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        attended.append(torch.einsum("hqk,khd->qhd", shares, value[first:last]))
    return torch.cat(attended)


def held_out_accuracy(client: RolloutClient, policy: str | None) -> float:
    """The share of 1,000 additions that none was trained on which the policy gets right, by the service's own task."""
    _, questions = additions()
    sampling = Sampling(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS)
    response = client.rollout(questions, sampling=sampling, policy={} if policy is None else {"name": policy})
    right = response.metrics["mean_total_reward"]
    assert isinstance(right, float)
    return right


def newest_adapter(client: RolloutClient) -> str:
    served = [policy.name for policy in client.policy.state().named if policy.current is not None]
    return max(served, key=lambda name: int(name.rpartition("v")[2]))


def main() -> None:
    options = parser().parse_args()
    with RolloutClient(options.url) as client:
        client.wait_until_ready()
        before = held_out_accuracy(client, None)
        logged = train(options)
        after = held_out_accuracy(client, None if options.all_weights else newest_adapter(client))
    ratios = [step["ratio"] for step in logged if "ratio" in step]
    figures = {"held_out": [before, after], "steps": len(logged), "ratio": [min(ratios), max(ratios)] if ratios else []}
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()

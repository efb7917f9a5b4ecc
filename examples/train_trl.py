"""The training of `train_grpo.py` with TRL: its `GRPOTrainer` takes rollouts from the service and pushes weights to it.

    python -m examples.train_trl models/smollm2 --questions samples.jsonl --url http://127.0.0.1:8000

Learn from it how TRL uses the service. The adapter pushes the weights before the trainer's next rollouts. A step of TRL
is one gradient step; a batch of rollouts lasts for `minibatches * EPOCHS` steps.
"""

import argparse
import json
import logging
import sys
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from examples.train_grpo import EPOCHS, GRADIENT_NORM, LOGITS_BYTES, Figures, accuracy, parser, questions, summary
from rollout_client import PolicyPusher, RolloutClient, SampleInput, Sampling
from rollout_client.trainers.trl import ServiceRolloutFunc, service_reward

logger = logging.getLogger(__name__)


def train(options: argparse.Namespace, client: RolloutClient) -> list[Figures]:
    """Trains on samples of one task; returns the figures of each batch of rollouts, as `train_grpo.train` does."""
    torch.set_num_threads(options.threads)
    trained_on, held_out = questions(options)
    samples = [sample.model_dump(exclude_unset=True) for sample in trained_on]
    rows = [{"prompt": sample["messages"], "extra_env_info": sample["extra_env_info"]} for sample in samples]
    rollout_func = ServiceRolloutFunc(client, task_name=samples[0]["task_name"])
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(options.model, dtype=torch.float32)
    rank = options.lora_rank
    measurement = Measurement(client, held_out, rollout_func.pusher, options)
    trainer = GRPOTrainer(
        model,
        args=trainer_arguments(options, model.config.get_text_config().vocab_size),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=service_reward,
        rollout_func=rollout_func,
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None,
        callbacks=[measurement],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return measurement.history


def trainer_arguments(options: argparse.Namespace, vocab_size: int) -> GRPOConfig:
    steps_per_batch = options.minibatches * EPOCHS
    rows = options.prompts_per_step * options.num_generations // options.minibatches
    # A minibatch at once would take 14 GB for a vocabulary of 49,152.
    most = LOGITS_BYTES // (vocab_size * options.max_new_tokens * 4)
    at_once = max(number for number in range(1, rows + 1) if rows % number == 0 and number <= max(most, 1))
    return GRPOConfig(
        max_steps=options.steps * steps_per_batch,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        steps_per_generation=options.minibatches * rows // at_once,
        num_iterations=EPOCHS,
        num_generations=options.num_generations,
        temperature=1.0,
        max_completion_length=options.max_new_tokens,
        learning_rate=options.learning_rate,
        warmup_steps=min(5, 1 + options.steps // 6) * steps_per_batch,
        max_grad_norm=GRADIENT_NORM,
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


class Measurement(TrainerCallback):
    """Measures before, every `measure_every` batches of rollouts, and at the end."""

    def __init__(
        self, client: RolloutClient, held_out: list[SampleInput], pusher: PolicyPusher, options: argparse.Namespace
    ) -> None:
        self.history: list[Figures] = [{} for _ in range(options.steps + 1)]
        self._client = client
        self._held_out = held_out
        self._pusher = pusher
        self._options = options

    def on_train_begin(self, *_event: Any, **about: Any) -> None:
        self._measure(0, about["model"])

    def on_step_end(self, args: Any, state: Any, *_event: Any, **about: Any) -> None:
        batch, rest = divmod(state.global_step, self._options.minibatches * EPOCHS)
        if rest == 0 and (batch % self._options.measure_every == 0 or state.global_step == args.max_steps):
            self._measure(batch, about["model"])

    def on_log(self, *event: Any, **about: Any) -> None:
        _, state, _ = event
        if "reward" in about["logs"]:
            batch = -(-state.global_step // (self._options.minibatches * EPOCHS))
            self.history[batch]["reward"] = about["logs"]["reward"]

    def _measure(self, batch: int, model: Any) -> None:
        is_adapter = isinstance(model, PeftModel)
        update = self._client.push_weights(model, kind="adapter") if is_adapter else self._pusher.push(model)
        sampling = Sampling(temperature=1.0, max_new_tokens=self._options.max_new_tokens)
        self.history[batch]["held_out"] = accuracy(self._client, self._held_out, sampling, update.version)
        logger.info("Batch %s of %s: %s", batch, self._options.steps, json.dumps(self.history[batch]))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parser().parse_args()
    with RolloutClient(options.url) as client:
        client.wait_until_ready()
        sys.stdout.write(f"{json.dumps(summary(train(options, client)))}\n")


if __name__ == "__main__":
    main()

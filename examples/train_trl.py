"""The training of `train_grpo.py` with TRL: its `GRPOTrainer` takes rollouts from the service and pushes weights to it.

Learn from it how TRL uses the service. The adapter pushes the weights before the trainer's next rollouts. A step of TRL
is one gradient step; a batch of rollouts lasts for `minibatches * EPOCHS` steps.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from examples.train_grpo import (
    EMBEDDED,
    EPOCHS,
    GRADIENT_NORM,
    LOGITS_BYTES,
    QUESTIONS,
    SAMPLING,
    Curve,
    CurveOption,
    Questions,
    Recipe,
    SeedOption,
    UrlOption,
    config_of_model,
    held_out_accuracy,
    lora_of,
    model_and_recipe,
    progress_bar,
    running_service,
    warmup_steps,
)
from rollout_client import PolicyPusher, RolloutClient
from rollout_client.trainers.trl import ServiceRolloutFunc, service_reward

BATCHES_OF_ROLLOUTS = 45
"""Of the embedded model."""


def main(
    model: Annotated[str | None, typer.Argument(help="As of rollout serve; by default the embedded model.")] = None,
    url: UrlOption = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Batches of rollouts.")] = None,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train_trl.png"),
) -> None:
    """Trains a model with TRL, any but the embedded one with LoRA, and measures it on questions held out."""
    console = Console(stderr=True)
    folder, recipe = model_and_recipe(model, None)
    recipe = recipe._replace(steps=batches or (BATCHES_OF_ROLLOUTS if recipe is EMBEDDED else recipe.steps))
    with running_service(partial(config_of_model, folder, recipe.lora_rank), url, console) as client:
        trained = train(client, folder, recipe, seed, console)
    trained.report(curve, console)


def train(
    client: RolloutClient,
    folder: str,
    recipe: Recipe,
    seed: int,
    console: Console,
) -> Curve:
    # The service computes on the same cores; with a second thread the two would mostly wait for each other.
    torch.set_num_threads(1)
    curve = Curve(f"TRL's GRPOTrainer: {Path(folder).name}, {recipe.questions}")
    questions = QUESTIONS[recipe.questions]()
    samples = [sample.model_dump(exclude_unset=True) for sample in questions.trained_on]
    rows = [{"prompt": sample["messages"], "extra_env_info": sample["extra_env_info"]} for sample in samples]
    rollout_func = ServiceRolloutFunc(client, task_name="math")
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(folder, dtype=torch.float32)
    with progress_bar(console) as progress:
        trainer = GRPOTrainer(
            model,
            args=trainer_arguments(recipe, seed, model.config.get_text_config().vocab_size),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=service_reward,
            rollout_func=rollout_func,
            peft_config=lora_of(recipe.lora_rank) if recipe.lora_rank else None,
            callbacks=[Measurement(client, questions, rollout_func.pusher, curve, progress, recipe)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return curve


def trainer_arguments(recipe: Recipe, seed: int, vocab_size: int) -> GRPOConfig:
    steps_per_batch = recipe.minibatches * EPOCHS
    rows = recipe.prompts_per_step * recipe.num_generations // recipe.minibatches
    # A minibatch at once would take 14 GB for a vocabulary of 49,152.
    most = LOGITS_BYTES // (vocab_size * recipe.max_new_tokens * 4)
    at_once = max(number for number in range(1, rows + 1) if rows % number == 0 and number <= max(most, 1))
    return GRPOConfig(
        max_steps=recipe.steps * steps_per_batch,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        steps_per_generation=recipe.minibatches * rows // at_once,
        num_iterations=EPOCHS,
        num_generations=recipe.num_generations,
        temperature=SAMPLING.temperature,
        max_completion_length=SAMPLING.max_new_tokens,
        learning_rate=recipe.learning_rate,
        warmup_steps=warmup_steps(recipe.steps) * steps_per_batch,
        max_grad_norm=GRADIENT_NORM,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


class Measurement(TrainerCallback):
    """Records the learning curve and shows it, by batches of rollouts."""

    def __init__(
        self,
        client: RolloutClient,
        questions: Questions,
        pusher: PolicyPusher,
        curve: Curve,
        progress: Progress,
        recipe: Recipe,
    ) -> None:
        self.client = client
        self.questions = questions
        self.pusher = pusher
        self.curve = curve
        self.progress = progress
        self.recipe = recipe
        self.steps_per_batch = recipe.minibatches * EPOCHS
        self.bar = progress.add_task("", total=recipe.steps, latest="")

    def on_train_begin(self, *_event: Any, **about: Any) -> None:
        self.measure(0, about["model"])

    def on_step_end(self, args: Any, state: Any, *_event: Any, **about: Any) -> None:
        batches, rest = divmod(state.global_step, self.steps_per_batch)
        self.progress.update(self.bar, completed=batches)
        is_due = batches % self.recipe.steps_between_measurements == 0 or state.global_step == args.max_steps
        if rest == 0 and is_due:
            self.measure(batches, about["model"])
            self.progress.console.print(f"After {batches} batches of rollouts: {self.curve.latest}")

    def on_log(self, *event: Any, **about: Any) -> None:
        _, state, _ = event
        if about["logs"].get("reward") is not None:
            batch = -(-state.global_step // self.steps_per_batch)
            self.curve.reward[batch] = about["logs"]["reward"]
            if "mismatch/mean_ratio" in about["logs"]:
                self.curve.ratio[batch] = about["logs"]["mismatch/mean_ratio"]
            self.progress.update(self.bar, latest=self.curve.latest)

    def measure(self, batches: int, model: Any) -> None:
        is_adapter = isinstance(model, PeftModel)
        update = self.client.push_weights(model, kind="adapter") if is_adapter else self.pusher.push(model)
        self.curve.held_out[batches] = held_out_accuracy(self.client, self.questions, update.version)
        self.progress.update(self.bar, latest=self.curve.latest)


if __name__ == "__main__":
    typer.run(main)

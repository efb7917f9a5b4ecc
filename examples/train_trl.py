"""The training of `train_grpo.py` with TRL: its `GRPOTrainer` takes rollouts from the service and pushes weights to it.

Learn from it how TRL uses the service. The adapter pushes the weights before the trainer's next rollouts. A step of TRL
is one gradient step; a batch of rollouts lasts for `MINIBATCHES * ITERATIONS` steps.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from examples.task_configs import CONFIG, ConfigArgument
from examples.train_grpo import (
    SAMPLING,
    Curve,
    CurveOption,
    Questions,
    SeedOption,
    UrlOption,
    additions,
    held_out_accuracy,
    progress_bar,
    running_service,
)
from rollout_client import PolicyPusher, RolloutClient
from rollout_client.trainers.trl import ServiceRolloutFunc, service_reward
from service.startup.config import read_config
from service.startup.generated_config import EMBEDDED_MODEL
from service.startup.ports import free_port

BATCHES_OF_ROLLOUTS = 45
PROMPTS_PER_BATCH = 256
NUM_GENERATIONS = 4
MINIBATCHES = 4
ITERATIONS = 2
STEPS_PER_BATCH = MINIBATCHES * ITERATIONS
MEASURE_EVERY_BATCHES = 15


def main(
    config: ConfigArgument = CONFIG,
    url: UrlOption = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches of rollouts.")] = BATCHES_OF_ROLLOUTS,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train_trl.png"),
) -> None:
    """Trains the embedded model on additions with TRL and measures it on sums that it never sees."""
    console = Console(stderr=True)
    with running_service(lambda: read_config(config, port=free_port()), url, console) as client:
        trained = train(client, batches, seed, console)
    trained.report(curve, console)


def train(client: RolloutClient, batches: int, seed: int, console: Console) -> Curve:
    # The service computes on the same cores; with a second thread the two would mostly wait for each other.
    torch.set_num_threads(1)
    curve = Curve("TRL's GRPOTrainer on additions")
    questions = additions()
    sums = [sample.model_dump(exclude_unset=True) for sample in questions.trained_on]
    rows = [{"prompt": sample["messages"], "extra_env_info": sample["extra_env_info"]} for sample in sums]
    rollout_func = ServiceRolloutFunc(client, task_name="math")
    with progress_bar(console) as progress:
        trainer = GRPOTrainer(
            LlamaForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32),
            args=trainer_arguments(batches, seed),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(EMBEDDED_MODEL),
            reward_funcs=service_reward,
            rollout_func=rollout_func,
            callbacks=[Measurement(client, questions, rollout_func.pusher, curve, progress, batches)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return curve


def trainer_arguments(batches: int, seed: int) -> GRPOConfig:
    return GRPOConfig(
        max_steps=batches * STEPS_PER_BATCH,
        per_device_train_batch_size=PROMPTS_PER_BATCH * NUM_GENERATIONS // MINIBATCHES,
        steps_per_generation=MINIBATCHES,
        num_iterations=ITERATIONS,
        num_generations=NUM_GENERATIONS,
        temperature=SAMPLING.temperature,
        max_completion_length=SAMPLING.max_new_tokens,
        learning_rate=1.5e-4,
        warmup_steps=5 * STEPS_PER_BATCH,
        max_grad_norm=0.5,
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
        batches: int,
    ) -> None:
        self.client = client
        self.questions = questions
        self.pusher = pusher
        self.curve = curve
        self.progress = progress
        self.bar = progress.add_task("", total=batches, latest="")

    def on_train_begin(self, *_event: Any, **about: Any) -> None:
        self.measure(0, about["model"])

    def on_step_end(self, args: Any, state: Any, *_event: Any, **about: Any) -> None:
        batches, rest = divmod(state.global_step, STEPS_PER_BATCH)
        self.progress.update(self.bar, completed=batches)
        if rest == 0 and (batches % MEASURE_EVERY_BATCHES == 0 or state.global_step == args.max_steps):
            self.measure(batches, about["model"])
            self.progress.console.print(f"After {batches} batches of rollouts: {self.curve.latest}")

    def on_log(self, *event: Any, **about: Any) -> None:
        _, state, _ = event
        if about["logs"].get("reward") is not None:
            self.curve.reward[-(-state.global_step // STEPS_PER_BATCH)] = about["logs"]["reward"]
            self.progress.update(self.bar, latest=self.curve.latest)

    def measure(self, batches: int, model: Any) -> None:
        version = self.pusher.push(model).version
        self.curve.held_out[batches] = held_out_accuracy(self.client, self.questions, version)
        self.progress.update(self.bar, latest=self.curve.latest)


if __name__ == "__main__":
    typer.run(main)

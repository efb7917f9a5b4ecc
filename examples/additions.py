"""What the training examples share: their options, which sums are learnt and which are measured, the curve, the bar.

The embedded model has never seen the sums that `models/tiny/train.py` holds out. Reinforcement learning must not see
them either, in neither order of their operands. Training and measuring sample alike, at temperature 1.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deployments.environments.math import LARGEST_OPERAND, addition_prompt, addition_sample
from models.tiny.train import addition_pairs
from rollout_client import RolloutClient, RolloutResponse, SampleInput, Sampling
from service.local import local_service, sentences_for_the_user
from service.startup.config import read_config
from service.startup.ports import free_port

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny"
SEED_OF_THE_MODEL = 0
SAMPLING = Sampling(temperature=1.0, max_new_tokens=24)
ALL_SUMS = (LARGEST_OPERAND + 1) ** 2
# With 1,000 sums, a standard error of one percentage point.
ROLLOUTS_A_SUM = 2
CONFIG = Path("serve_config.cpu.yaml")
ConfigArgument = Annotated[Path, typer.Argument(help="Serve config of the service to start.")]
UrlOption = Annotated[str | None, typer.Option(help="A running service, in place of starting one.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of the order of prompts; sampling is not seeded.")]
CurveOption = Annotated[Path, typer.Option(help="Where the curve is drawn, as PNG.")]

_, HELD_OUT = addition_pairs(SEED_OF_THE_MODEL)


@contextmanager
def running_service(config: Path, url: str | None, console: Console) -> Iterator[RolloutClient]:
    """A client of the service at `url`, or without it of one that runs for the length of the block."""
    service = local_service(read_config(config, port=free_port()), console) if url is None else nullcontext(url)
    with sentences_for_the_user(console), service as address, RolloutClient(address) as client:
        client.wait_until_ready()
        yield client


def training_sums(client: RolloutClient, seed: int) -> list[SampleInput]:
    """All sums of the task, but those held out and their mirror images, in an order drawn by `seed`."""
    held_out = {addition_prompt(*operands) for pair in HELD_OUT for operands in (pair, pair[::-1])}
    sums = client.example_samples("math", ALL_SUMS, seed)
    return [sample for sample in sums if sample.messages and sample.messages[0].content not in held_out]


def held_out_accuracy(client: RolloutClient, version: int) -> float:
    """The share of held-out sums that weights `version` get right at temperature 1."""
    sums = [{"task_name": "math", **addition_sample(*pair)} for pair in HELD_OUT]
    return mean_reward(
        client.rollout(sums, num_generations=ROLLOUTS_A_SUM, sampling=SAMPLING, policy={"version": version})
    )


def mean_reward(response: RolloutResponse) -> float:
    """Without the samples that failed, which were worth neither nothing nor anything else."""
    rewards = [sample.total_reward for sample in response.samples if sample.total_reward is not None]
    return sum(rewards) / len(rewards)


@dataclass
class Curve:
    """What a training run came to, by batches of rollouts learnt from; shares between 0 and 1."""

    title: str
    held_out: dict[int, float] = field(default_factory=dict)
    """After so many batches."""
    reward: dict[int, float] = field(default_factory=dict)
    """The mean of the batch, numbered from 1."""

    @property
    def latest(self) -> str:
        """The latest figures, for the eye."""
        latest = {"held-out": self.held_out, "reward": self.reward}
        return ", ".join(f"{name} {[*shares.values()][-1]:.1%}" for name, shares in latest.items() if shares)

    def report(self, path: Path, console: Console) -> None:
        """Draws the curve and says on stdout, in one line of JSON, where it began and where it ended."""
        self.draw(path)
        console.print(f"The curve is in {path}.")
        before, *_, after = self.held_out.values()
        typer.echo(json.dumps({"held_out_before": round(before, 4), "held_out_after": round(after, 4)}))

    def draw(self, path: Path) -> None:
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        steps, rewards = list(self.reward), list(self.reward.values())
        axes.plot(steps, rewards, ".", label="mean reward of the rollouts trained on", color="tab:gray", alpha=0.6)
        steps, shares = list(self.held_out), list(self.held_out.values())
        axes.plot(steps, shares, "o-", label=f"accuracy on {len(HELD_OUT):,} held-out sums", color="tab:blue")
        axes.set(xlabel="batches of rollouts", ylabel="share right, at temperature 1", ylim=(0, 1), title=self.title)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def progress_bar(console: Console) -> Progress:
    """Counts batches of rollouts; a task's field `latest` stands at the end of the line."""
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*bar, TextColumn("{task.fields[latest]}"), console=console)

"""Shared by the training examples: options, training and held-out additions, the learning curve, the progress bar.

The embedded model was trained without the additions that `models/tiny/train.py` holds out. Reinforcement learning
leaves them out too, in both orders of the operands, so that accuracy on them measures generalization. Training and
measurement use the same sampling, at temperature 1.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deployments.environments.math import LARGEST_OPERAND, addition_prompt, addition_sample
from models.tiny.train import addition_pairs
from rollout_client import RolloutClient, RolloutResponse, SampleInput, Sampling
from rollout_client.results import final_reward
from service.startup.config import read_config
from service.startup.local_service import local_service, sentences_for_the_user
from service.startup.ports import free_port

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny"
SEED_OF_THE_MODEL = 0
SAMPLING = Sampling(temperature=1.0, max_new_tokens=24)
ALL_SUMS = (LARGEST_OPERAND + 1) ** 2
ROLLOUTS_PER_SUM = 2
"""With 1,000 held-out sums, the standard error of the accuracy is one percentage point."""
CONFIG = Path("serve_config.cpu.yaml")
ConfigArgument = Annotated[Path, typer.Argument(help="Serve config of the service to start.")]
UrlOption = Annotated[str | None, typer.Option(help="URL of a running service; without it one is started.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the order of the prompts; sampling is not seeded.")]
CurveOption = Annotated[Path, typer.Option(help="File for the learning curve, a PNG.")]

_, HELD_OUT = addition_pairs(SEED_OF_THE_MODEL)


@contextmanager
def running_service(config: Path, url: str | None, console: Console) -> Iterator[RolloutClient]:
    """A client of the service at `url`; without a URL, a service runs for the length of the block."""
    with (
        service_or_url(lambda: read_config(config, port=free_port()), url, console) as address,
        RolloutClient(address) as client,
    ):
        client.wait_until_ready()
        yield client


@contextmanager
def service_or_url(config: Callable[[], ServeDeploySchema], url: str | None, console: Console) -> Iterator[str]:
    """The URL; without one, that of a service with the config, which runs for the length of the block."""
    with sentences_for_the_user(console):
        service = local_service(config(), console) if url is None else nullcontext(url)
        with service as address:
            yield address


def training_sums(client: RolloutClient, seed: int) -> list[SampleInput]:
    """All additions of the task except the held-out ones in either order, shuffled by `seed`."""
    held_out = {addition_prompt(*operands) for pair in HELD_OUT for operands in (pair, pair[::-1])}
    sums = client.example_samples("math", ALL_SUMS, seed)
    return [sample for sample in sums if sample.messages and sample.messages[0].content not in held_out]


def held_out_accuracy(client: RolloutClient, version: int) -> float:
    """The share of held-out additions that the weights of `version` get right, from 0 to 1."""
    sums = [{"task_name": "math", **addition_sample(*pair)} for pair in HELD_OUT]
    return mean_reward(
        client.rollout(sums, num_generations=ROLLOUTS_PER_SUM, sampling=SAMPLING, policy={"version": version})
    )


def mean_reward(response: RolloutResponse) -> float:
    """The mean total reward of the rollouts whose reward is final. Of a failed or stale one it is unknown, not zero."""
    rewards = [reward for reward in map(final_reward, response.samples) if reward is not None]
    return sum(rewards) / len(rewards)


@dataclass
class Curve:
    """The learning curve of one training run: shares from 0 to 1, by the number of batches trained on."""

    title: str
    held_out: dict[int, float] = field(default_factory=dict)
    """Accuracy on the held-out additions, after this many batches."""
    reward: dict[int, float] = field(default_factory=dict)
    """Mean reward of each batch; the first is number 1."""

    @property
    def latest(self) -> str:
        """The latest figures as text."""
        latest = {"held-out": self.held_out, "reward": self.reward}
        return ", ".join(f"{name} {[*shares.values()][-1]:.1%}" for name, shares in latest.items() if shares)

    def report(self, path: Path, console: Console) -> None:
        """Draws the curve, and prints first and last held-out accuracy to stdout as one line of JSON."""
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
    """A bar that counts batches of rollouts. The field `latest` of its task is shown at the end of the line."""
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*bar, TextColumn("{task.fields[latest]}"), console=console)

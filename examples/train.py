"""Starts a service with a model, trains the model on it, and draws the learning curve: `make train`.

The training itself is `examples/train_grpo.py`, or with `--trl` `examples/train_trl.py`. Options that are not named
here are theirs: `python -m examples.train --model models/smollm2 --steps 4`. The embedded model learns additions; any
other learns which of two numbers is larger, with LoRA.
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from examples.train_grpo import Figures, parser, summary, train
from rollout_client import RolloutClient
from service.startup.config import BUNDLED, config_of, free_port
from service.startup.generated_config import EMBEDDED_MODEL, ServedModel, generated_config, model_named
from service.startup.local_service import local_service, sentences_for_the_user

Questions = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""The samples to train on, and those to measure with."""
EMBEDDED = [
    "--steps=60",
    "--prompts-per-step=256",
    "--num-generations=4",
    "--minibatches=4",
    "--learning-rate=1.5e-4",
    "--lora-rank=0",
    "--measure-every=15",
]
"""The options of `train_grpo.py` for two million parameters; its defaults are for a hundred million."""


def additions() -> Questions:
    """Sums of two numbers below 100. The embedded model was trained on none of those held out."""
    pairs = [(left, right) for left in range(100) for right in range(100)]
    random.Random(0).shuffle(pairs)
    held_out = pairs[:1000]
    # Neither order of two numbers that are held out is trained on.
    known = {*held_out, *(pair[::-1] for pair in held_out)}
    return [sum_of(*pair) for pair in pairs if pair not in known], [sum_of(*pair) for pair in held_out]


def sum_of(left: int, right: int) -> dict[str, Any]:
    return asked(f"What is {left} + {right}?", left + right)


def larger_numbers() -> Questions:
    """Which of two numbers of up to three digits is larger. Pairs whose sum ends with 7 are held out."""
    draw = random.Random(0)
    pairs = [tuple(draw.sample(range(1000), 2)) for _ in range(2000)]
    trained_on, held_out = ([pair for pair in pairs if (sum(pair) % 10 == 7) is held] for held in (False, True))
    return [larger_of(*pair) for pair in trained_on], [larger_of(*pair) for pair in held_out[:100]]


def larger_of(left: int, right: int) -> dict[str, Any]:
    question = "Which number is larger, {} or {}?"
    # An answered question shows that the number alone is wanted: of a sentence the last number would count.
    example = [{"role": "user", "content": question.format(12, 47)}, {"role": "assistant", "content": "47"}]
    return asked(question.format(left, right), max(left, right), example)


def asked(question: str, answer: int, before: Sequence[dict[str, str]] = ()) -> dict[str, Any]:
    messages = [*before, {"role": "user", "content": question}]
    return {"task_name": "math", "messages": messages, "extra_env_info": {"ground_truth": str(answer)}}


def is_embedded(model: str) -> bool:
    """Whether it is the embedded model, by a link of the package or by its folder in a checkout."""
    return (Path(model) / "config.json").resolve() == (EMBEDDED_MODEL / "config.json").resolve()


def config_of_model(model: str, takes_adapters: bool = False) -> ServeDeploySchema:
    """A service of the model with the task math, which keeps records of rollouts."""
    engine = {"enable_lora": True} if takes_adapters else {}
    raw = generated_config(ServedModel(model, gpus=0, engine=engine), ["math"], {"port": free_port()}, {})
    raw["applications"][0]["args"]["rollout_records"] = {}
    return config_of(raw, BUNDLED / "serve_config.yaml")


@contextmanager
def running_service(config: ServeDeploySchema) -> Iterator[str]:
    """The URL of a service with the config, which runs for the length of the block."""
    console = Console(stderr=True)
    with sentences_for_the_user(console), local_service(config, console) as url:
        yield url


def trained(model: str, url: str, options: Sequence[str], loop: Callable[..., list[Figures]] = train) -> list[Figures]:
    """Trains the model on its questions, unless the options name others."""
    recipe, samples = (EMBEDDED, additions()) if is_embedded(model) else ([], larger_numbers())
    with TemporaryDirectory() as folder, RolloutClient(url) as client:
        files = [Path(folder, name) for name in ("questions.jsonl", "held_out.jsonl")]
        for path, part in zip(files, samples, strict=True):
            path.write_text("".join(f"{json.dumps(sample)}\n" for sample in part))
        client.wait_until_ready()
        named = any(option.startswith("--questions") for option in options)
        given = [] if named else [f"--questions={files[0]}", f"--held-out={files[1]}"]
        return loop(parser().parse_args([model, *recipe, *given, *options]), client)


def draw(history: list[Figures], title: str, path: Path) -> None:
    """Draws the learning curve: shares from 0 to 1, by the number of steps."""
    import matplotlib.pyplot as plt

    def points(name: str) -> tuple[list[int], list[float]]:
        steps = [step for step, figures in enumerate(history) if name in figures]
        return steps, [history[step][name] for step in steps]

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*points("reward"), ".", label="mean reward", color="tab:gray", alpha=0.6)
    axes.plot(*points("held_out"), "o-", label="accuracy held out", color="tab:blue")
    axes.set(xlabel="batches of rollouts", ylabel="share right, at temperature 1", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    if points("difference")[0]:
        other = axes.twinx()
        other.plot(*points("difference"), "x", color="tab:red", alpha=0.6)
        other.set(ylabel="mean distance of log-probabilities (x)", ylim=(0, None))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(history: list[Figures], title: str, path: Path) -> None:
    """Draws the curve, and prints its figures to stdout as one line of JSON."""
    draw(history, title, path)
    logging.getLogger(__name__).info("The curve is in %s.", path)
    sys.stdout.write(f"{json.dumps(summary(history))}\n")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    arguments.add_argument("--model", default=str(EMBEDDED_MODEL), help="As of rollout serve.")
    arguments.add_argument("--trl", action="store_true", help="Train with TRL's GRPOTrainer.")
    arguments.add_argument("--curve", type=Path, default=Path("train.png"), help="File for the learning curve.")
    known, options = arguments.parse_known_args()
    loop = train
    if known.trl:
        from examples.train_trl import train as loop
    model = model_named(known.model)
    # What LoRA has learnt is pushed by the loop merged, and by TRL's adapter alone.
    with running_service(config_of_model(model, takes_adapters=known.trl and not is_embedded(model))) as url:
        history = trained(model, url, options, loop)
    report(history, f"{'TRL' if known.trl else 'GRPO'}: {Path(model).name}", known.curve)


if __name__ == "__main__":
    main()

"""How far log-probabilities in bfloat16 lie from float32, under the right weights and others: `make bench-precision`.

SmolLM2-135M-Instruct gets new weights in all ways, each while rollouts run: full weights, a delta, a merged LoRA
adapter, a rollback, and an adapter by itself. transformers then computes the log-probabilities of all generated tokens
in float32 under the version that each token's span names, and of some rollouts under every other version. Ends with
exit code 1 beyond a bound; the last line is JSON.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from time import sleep
from typing import Annotated, Any, Literal

import matplotlib.pyplot as plt
import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from benchmarks.process_group import no_process_left
from benchmarks.reference_model import spans_of, token_ids_of
from examples.train_grpo import config_of_model
from models.smollm2.recipe import made
from rollout_client import PolicyPusher, RolloutClient, SampleResult
from service.startup.local_service import local_service, sentences_for_the_user

MEAN_BOUND, LARGEST_BOUND, TIMES_FARTHER = 0.06, 0.6, 5.0
NEW_TOKENS = 48
LORA_RANK = 8
CHANGE = 0.04
"""Standard deviation of a perturbed weight, of itself."""
LORA_SHARE = 0.25
"""Of the size of PEFT's random matrices. Whole, they change log-probabilities by 1.6 in the mean: no training does."""
SCORED_TOGETHER = 8
PUSHED_AFTER_S = 3.0
SUBJECTS = [
    "the sea",
    "a clock",
    "rain",
    "bread",
    "a bridge",
    "the moon",
    "chess",
    "a garden",
    "snow",
    "a letter",
    "a train",
    "music",
]
FORMS = ["a sentence", "a short story", "a question", "a poem", "advice", "a riddle", "a speech", "a list of facts"]
WAYS = ("full weights", "a delta", "a merged adapter", "a rollback", "an adapter")
console = Console(stderr=True)


def main(
    rollouts: Annotated[int, typer.Option(min=6, help="Of all versions together.")] = 1000,
    also_elsewhere: Annotated[int, typer.Option(min=1, help="Of each part, also under every other version.")] = 20,
    picture: Annotated[Path, typer.Option(help="File for the distances, a PNG.")] = Path("precision.png"),
    head: Annotated[
        Literal["float32", "model"], typer.Option(help="Type in which the engine computes logits.")
    ] = "float32",
) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    with sentences_for_the_user(console), no_process_left():
        folder = made(console)
        config = config_of_model(str(folder), LORA_RANK, hf_overrides={"head_dtype": head})
        with local_service(config, console) as url, RolloutClient(url) as client:
            parts, models = play_while_pushing(client, folder, -(-rollouts // (2 + len(WAYS))))
    own, elsewhere = distances_of(parts, models, also_elsewhere)
    draw(own, elsewhere, picture)
    report(own, elsewhere, sum(map(len, parts)))


def play_while_pushing(
    client: RolloutClient, folder: Path, count: int
) -> tuple[list[list[SampleResult]], dict[str, Any]]:
    """So many rollouts before all pushes, during each and after all, and the float32 model of each version."""
    policy = Policy(client, folder)
    models = {str(client.policy().current): rounded(policy.model)}
    parts = [play(client, count)]
    with ThreadPoolExecutor(1) as threads:
        for way in WAYS:
            playing = threads.submit(play, client, count)
            sleep(PUSHED_AFTER_S)
            version, model = policy.push(way)
            console.print(f"Version {version}: {way}, pushed while {count} rollouts ran")
            models[str(version)] = model
            parts.append(playing.result())
    parts.append(play(client, count))
    return parts, models


class Policy:
    """A trainer's model, which changes before each push."""

    def __init__(self, client: RolloutClient, folder: Path) -> None:
        untyped: Any = AutoModelForCausalLM
        torch.manual_seed(0)
        self.model = untyped.from_pretrained(folder, dtype=torch.float32).eval()
        self._client, self._pusher = client, PolicyPusher(client)
        self._under_adapters: tuple[int, Any] | None = None

    def push(self, way: str) -> tuple[int, Any]:
        """Returns the version, and its model with the values that bfloat16 leaves."""
        if way in ("full weights", "a delta"):
            perturb(self.model, 1.0 if way == "full weights" else 0.2)
            self._under_adapters = self._pusher.push(self.model).version, rounded(self.model)
            return self._under_adapters
        assert self._under_adapters is not None
        base, under = self._under_adapters
        if way == "a rollback":
            return self._client.rollback(base).version, under
        adapted: Any = get_peft_model(deepcopy(under), lora())
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data *= LORA_SHARE
        if way == "an adapter":
            version = self._client.push_weights(adapted, kind="adapter", base=base).version
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.bfloat16().float()
            return version, adapted.merge_and_unload()
        adapted.merge_adapter()
        version = self._pusher.push(adapted).version
        return version, rounded(adapted)


def lora() -> LoraConfig:
    return LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", init_lora_weights=False)


def perturb(model: Any, share: float) -> None:
    """Changes this share of the values of each tensor."""
    for parameter in model.parameters():
        noise = CHANGE * torch.randn_like(parameter) * (torch.rand_like(parameter) < share)
        parameter.data *= 1 + noise


def rounded(model: Any) -> Any:
    """A float32 copy with the values that a push leaves, which rounds to bfloat16."""
    return deepcopy(model).bfloat16().float().eval()


def play(client: RolloutClient, count: int) -> list[SampleResult]:
    asked = [f"Write {form} about {subject}." for subject in SUBJECTS for form in FORMS]
    samples = [
        {
            "task_name": "math",
            "messages": [{"role": "user", "content": asked[place % len(asked)]}],
            "extra_env_info": {"ground_truth": "0"},
        }
        for place in range(count)
    ]
    return client.rollout(samples, sampling={"temperature": 1.0, "max_new_tokens": NEW_TOKENS}).samples


Distances = dict[str, torch.Tensor]
"""Of log-probabilities, absolute, a token each, by the version that made the tokens."""


def distances_of(
    parts: Sequence[Sequence[SampleResult]], models: dict[str, Any], also_elsewhere: int
) -> tuple[Distances, Distances]:
    """From the version that each token names, and from the nearest other one."""
    own: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    elsewhere: defaultdict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    chosen = [(place < also_elsewhere, result) for part in parts for place, result in enumerate(part)]
    for version, model in models.items():
        # A rollback has the weights of an earlier version.
        due = [result for is_chosen, result in chosen if is_chosen or version in versions_of(result)]
        batches = range(0, len(due), SCORED_TOGETHER)
        for first in track(batches, f"Scoring under version {version}", console=console):
            for result, logprobs in scored(model, due[first : first + SCORED_TOGETHER]):
                for named, distances in distances_by_version(result, logprobs):
                    if named == version:
                        own[version].append(distances)
                    elif models[named] is not model:
                        elsewhere[named, version].append(distances)
    nearest: Distances = {}
    for (named, _), found in elsewhere.items():
        joined = torch.cat(found)
        if named not in nearest or joined.mean() < nearest[named].mean():
            nearest[named] = joined
    return {version: torch.cat(found) for version, found in own.items()}, nearest


def versions_of(result: SampleResult) -> set[str]:
    return {span.version for message in result.message_log for span in message.weight_versions or ()}


def scored(model: Any, results: Sequence[SampleResult]) -> list[tuple[SampleResult, torch.Tensor]]:
    """Each with the log-probabilities of its tokens but the first."""
    rows = [torch.tensor(token_ids_of(result)) for result in results]
    ids = pad_sequence(rows, batch_first=True)
    with torch.inference_mode():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return list(zip(results, logprobs, strict=True))


def distances_by_version(result: SampleResult, logprobs: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(version, (logprobs[places] - said).abs()) for version, places, said in spans_of(result)]


def draw(own: Distances, elsewhere: Distances, picture: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for distances, label in ((own, "the version that the span names"), (elsewhere, "the nearest other version")):
        values = torch.cat([*distances.values()]).sort().values
        axes.plot(values, torch.linspace(0, 1, len(values)), label=label)
    axes.set(
        xscale="log",
        xlim=(1e-4, 10),
        xlabel="distance of a token's log-probability from float32",
        ylabel="share of tokens below",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def report(own: Distances, elsewhere: Distances, rollouts: int) -> None:
    names = dict(zip(own, ("the checkpoint", *WAYS), strict=True))
    table = Table("version", "tokens", "mean", "largest", "mean, nearest other version", title="Distance from float32")
    for version, distances in own.items():
        other = f"{elsewhere[version].mean():.3f}" if version in elsewhere else ""
        row = (f"{distances.mean():.3f}", f"{distances.max():.2f}", other)
        table.add_row(f"{version}: {names[version]}", f"{len(distances):,}", *row)
    console.print(table)
    times = [float(elsewhere[version].mean() / own[version].mean()) for version in elsewhere]
    figures = {
        "rollouts": rollouts,
        "tokens": sum(map(len, own.values())),
        "largest_mean": round(max(float(distances.mean()) for distances in own.values()), 4),
        "largest": round(max(float(distances.max()) for distances in own.values()), 4),
        "times_farther": round(min(times), 1),
    }
    typer.echo(json.dumps(figures))
    is_right = figures["largest_mean"] <= MEAN_BOUND and figures["largest"] <= LARGEST_BOUND
    raise typer.Exit(0 if is_right and figures["times_farther"] >= TIMES_FARTHER else 1)


if __name__ == "__main__":
    typer.run(main)

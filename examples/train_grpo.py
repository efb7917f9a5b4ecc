"""Trains a model with GRPO: rollouts from the service, gradients here, new weights back after each step.

Learn from it a whole training loop, and copy it: it needs none of this repository's other files. Without `--url` it
serves the model itself; `--questions` trains on a task of your own. A model that sees gets the images of its rollouts.

The algorithm: advantages within the group of one prompt's rollouts, PPO's clipped objective against the
log-probabilities of the service, the mean over generated tokens, no reference model. The trainer's weights are float32,
so that updates too small for bfloat16 add up; the service gets them rounded.
"""

# mypy: disable-error-code="no-untyped-call"

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)

from rollout_client import PolicyPusher, RolloutClient, RolloutResponse, SampleInput, Sampling
from rollout_client.calls.records import ReportColumns
from rollout_client.results import final_reward
from rollout_client.tensors import RolloutTensors, image_inputs, images_shown, to_tensors
from service.startup.config import BUNDLED, config_of, free_port
from service.startup.generated_config import (
    EMBEDDED_MODEL,
    EMBEDDED_MODEL_THAT_SEES,
    ServedModel,
    generated_config,
    model_named,
    sees,
)
from service.startup.local_service import local_service, sentences_for_the_user

EPOCHS = 2
CLIP = 0.2
GRADIENT_NORM = 0.5
ROLLOUTS_PER_HELD_OUT = 2
LOGITS_BYTES = 2**25
"""Of one forward pass. With a large vocabulary the logits of a whole batch would take gigabytes, and with a large model
the activations, which grow with them: half of it halves the memory of a step, and takes little more time."""
SAMPLING = Sampling(temperature=1.0, max_new_tokens=24)
"""In training and in measurements."""
UrlOption = Annotated[str | None, typer.Option(help="URL of a running service; without it one is started.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the order of the prompts; sampling is not seeded.")]
CurveOption = Annotated[Path, typer.Option(help="File for the learning curve, a PNG.")]
ReportOption = Annotated[
    bool | None,
    typer.Option(
        help="Report the log-probabilities of each step to the service; by default if it keeps records of rollouts."
    ),
]
Policy = PreTrainedModel | PeftModel
"""The model, or what PEFT has made of it."""
ImageInputs = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""The images of rollouts, by their rows, as the model takes them."""
Report = Callable[[ReportColumns], None]


class Recipe(NamedTuple):
    """What fits a model: a run is a matter of minutes on two cores."""

    questions: str
    steps: int
    prompts_per_step: int
    num_generations: int
    minibatches: int
    learning_rate: float
    lora_rank: int
    steps_between_measurements: int
    max_new_tokens: int = 24
    keep_groups: int = 0
    """So many groups whose rewards differ train a step, of twice as many prompts at most; 0: all groups do."""


EMBEDDED = Recipe("additions", 60, 256, 4, 4, 1.5e-4, 0, 15)
"""Two million parameters at most."""
SMALL = Recipe("larger", 8, 16, 8, 2, 5e-4, 8, 4)
"""A hundred million parameters."""
SEEING = Recipe("shapes", 60, 64, 8, 4, 5e-4, 0, 15)
"""Half a million parameters that see."""
RECIPES = {EMBEDDED_MODEL: EMBEDDED, EMBEDDED_MODEL_THAT_SEES: SEEING}
"""By the model; `SMALL` for others."""


def main(
    model: Annotated[str | None, typer.Argument(help="As of rollout serve; by default the embedded model.")] = None,
    url: UrlOption = None,
    questions: Annotated[
        str | None,
        typer.Option(help="additions, larger, shapes, or a JSONL file of samples: task_name, messages, ..."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    prompts_per_step: Annotated[int | None, typer.Option(min=1)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply; longer ones are cut.")] = None,
    lora_rank: Annotated[int | None, typer.Option(min=0, help="0 trains all weights.")] = None,
    adapters: Annotated[bool, typer.Option(help="Push the adapter alone, in place of the merged weights.")] = False,
    learning_rate: Annotated[float | None, typer.Option(min=0)] = None,
    keep_groups: Annotated[
        int | None, typer.Option(min=0, help="Train each step on so many groups whose rewards differ; 0: on all.")
    ] = None,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train.png"),
    save: Annotated[Path | None, typer.Option(help="Folder for the trained model, with LoRA merged.")] = None,
    report_logprobs: ReportOption = None,
) -> None:
    """Trains a model and measures it on questions that it is not trained on."""
    console = Console(stderr=True)
    folder, recipe = model_and_recipe(model, questions)
    asked: dict[str, Any] = {
        "questions": questions,
        "steps": steps,
        "prompts_per_step": prompts_per_step,
        "max_new_tokens": max_new_tokens,
        "lora_rank": lora_rank,
        "learning_rate": learning_rate,
        "keep_groups": keep_groups,
    }
    recipe = recipe._replace(**{name: value for name, value in asked.items() if value is not None})
    if adapters and not recipe.lora_rank:
        raise typer.BadParameter("--adapters needs a --lora-rank above 0.")
    config = partial(config_of_model, folder, recipe.lora_rank if adapters else 0, TASKS.get(recipe.questions, "math"))
    with running_service(config, url, console) as client:
        trained = train(client, folder, recipe, adapters, seed, console, save, report_logprobs)
    trained.report(curve, console)


def model_and_recipe(model: str | None, questions: str | None) -> tuple[str, Recipe]:
    """The model's folder or its name on the Hub, as the service and transformers take it, and what fits it."""
    embedded = EMBEDDED_MODEL_THAT_SEES if questions in TASKS else EMBEDDED_MODEL
    named = model_named(model or str(embedded))
    # What the package brings are links to a checkout's `models`, which may be named as well.
    config = (Path(named) / "config.json").resolve()
    recipes = (recipe for folder, recipe in RECIPES.items() if (folder / "config.json").resolve() == config)
    return named, next(recipes, SMALL)


def config_of_model(model: str, adapter_rank: int, task: str = "math", **engine: Any) -> ServeDeploySchema:
    """A service of the model with the task, which takes adapters of this rank; with 0 none.

    `engine` are further settings of its section.
    """
    if adapter_rank:
        engine |= {"enable_lora": True, "max_lora_rank": adapter_rank}
    raw = generated_config(ServedModel(model, gpus=0, engine=engine), [task], {"port": free_port()}, {})
    raw["applications"][0]["args"]["rollout_records"] = {}
    return config_of(raw, BUNDLED / "serve_config.yaml")


def train(
    client: RolloutClient,
    folder: str,
    recipe: Recipe,
    adapters: bool,
    seed: int,
    console: Console,
    save: Path | None = None,
    report_logprobs: bool | None = None,
) -> "Curve":
    questions = QUESTIONS.get(recipe.questions, from_file(recipe.questions))()
    model, optimizer, schedule = model_to_train(folder, recipe, seed)
    processor = AutoProcessor.from_pretrained(folder) if sees(folder) else None
    prompts = prompt_batches(questions.trained_on, recipe.prompts_per_step * (2 if recipe.keep_groups else 1), seed)
    keep = {"groups": recipe.keep_groups, "where": {"reward_std": {"gt": 0}}} if recipe.keep_groups else None
    sampling = SAMPLING.model_copy(update={"max_new_tokens": recipe.max_new_tokens})
    push = pusher(client, model, adapters)
    version = push()
    curve = Curve(f"GRPO: {Path(folder).name}, {recipe.questions}")
    console.print(f"Measuring on {len(questions.held_out)} questions held out, then {recipe.steps} steps")
    curve.held_out[0] = held_out_accuracy(client, questions, version, sampling)
    reports = wants_reports(client, report_logprobs)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=recipe.steps, latest=curve.latest)
        for step in range(1, recipe.steps + 1):
            response = client.rollout(
                next(prompts),
                num_generations=recipe.num_generations,
                sampling=sampling,
                policy={"min_version": version},
                keep=keep,
            )
            curve.reward[step] = mean_reward(response)
            curve.tokens[step] = curve.tokens[step - 1] + generated_tokens(response)
            # Padding is in no loss, and causal attention does not see it: any token will do.
            batch = to_tensors(response, pad_token_id=0)
            images = no_images if processor is None else images_of(client, response, batch, processor)
            report = partial(report_step, client, version, step, curve, progress.console) if reports else None
            curve.difference[step] = improve(model, optimizer, batch, recipe.minibatches, images, report)
            schedule.step()
            version = push()
            if step % recipe.steps_between_measurements == 0 or step == recipe.steps:
                curve.held_out[step] = held_out_accuracy(client, questions, version, sampling)
                progress.console.print(f"After {step} steps: held-out {curve.held_out[step]:.1%}")
            progress.update(task, advance=1, latest=curve.latest)
            if not console.is_terminal:
                console.print(f"Step {step} of {recipe.steps}: {curve.latest}")
    if save is not None:
        merged = model.merge_and_unload() if isinstance(model, PeftModel) else model
        merged.save_pretrained(save)
        (AutoTokenizer if processor is None else AutoProcessor).from_pretrained(folder).save_pretrained(save)
    return curve


class Questions(NamedTuple):
    """Samples of one kind."""

    trained_on: list[SampleInput]
    held_out: list[SampleInput]


def additions() -> Questions:
    """Sums of two numbers below 100. The embedded model was trained on none of those held out."""
    pairs = [(left, right) for left in range(100) for right in range(100)]
    random.Random(0).shuffle(pairs)
    held_out = pairs[:1000]
    # Neither order of two numbers that are held out is trained on.
    known = {*held_out, *(pair[::-1] for pair in held_out)}
    return Questions([sum_of(*pair) for pair in pairs if pair not in known], [sum_of(*pair) for pair in held_out])


def sum_of(left: int, right: int) -> SampleInput:
    return asked(f"What is {left} + {right}?", left + right)


def larger_numbers() -> Questions:
    """Which of two numbers of up to three digits is larger. Pairs whose sum ends with 7 are held out."""
    draw = random.Random(0)
    pairs = [tuple(draw.sample(range(1000), 2)) for _ in range(2000)]
    trained_on, held_out = ([pair for pair in pairs if (sum(pair) % 10 == 7) is held] for held in (False, True))
    return Questions([larger_of(*pair) for pair in trained_on], [larger_of(*pair) for pair in held_out[:100]])


def larger_of(left: int, right: int) -> SampleInput:
    # An answered question shows that the number alone is wanted: of a sentence the last number would count.
    example = [{"role": "user", "content": larger_question(12, 47)}, {"role": "assistant", "content": "47"}]
    return asked(larger_question(left, right), max(left, right), example)


def larger_question(left: int, right: int) -> str:
    return f"Which number is larger, {left} or {right}?"


def asked(question: str, answer: int, before: Sequence[dict[str, str]] = ()) -> SampleInput:
    messages = [*before, {"role": "user", "content": question}]
    return SampleInput.model_validate(
        {"task_name": "math", "messages": messages, "extra_env_info": {"ground_truth": str(answer)}}
    )


def shapes() -> Questions:
    """How many shapes of one color and form a picture shows, which the environment draws from the seed."""
    return Questions([*map(count_in, range(500, 20_000))], [*map(count_in, range(500))])


def count_in(seed: int) -> SampleInput:
    return SampleInput.model_validate({"task_name": "shapes", "extra_env_info": {"kind": "count", "seed": seed}})


def from_file(path: str) -> Callable[[], Questions]:
    """The samples of a file of JSON lines; each tenth is held out."""

    def read() -> Questions:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        samples = [SampleInput.model_validate_json(line) for line in lines if line.strip()]
        return Questions([sample for place, sample in enumerate(samples) if place % 10], samples[::10])

    return read


QUESTIONS: dict[str, Callable[[], Questions]] = {"additions": additions, "larger": larger_numbers, "shapes": shapes}
TASKS = {"shapes": "shapes"}
"""Of questions that are not the task `math`'s."""


def prompt_batches(samples: list[SampleInput], prompts_per_step: int, seed: int) -> Iterator[list[SampleInput]]:
    """Yields the prompts of one step after another without end; those of a step are all different."""
    draw = random.Random(seed)
    while True:
        yield draw.sample(samples, min(prompts_per_step, len(samples)))


def model_to_train(
    folder: str, recipe: Recipe, seed: int
) -> tuple[Policy, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The model in float32, its optimizer, and the learning rates of all steps."""
    torch.manual_seed(seed)
    # The service computes on the same cores; with a second thread the two would mostly wait for each other.
    torch.set_num_threads(1)
    untyped: Any = AutoModelForImageTextToText if sees(folder) else AutoModelForCausalLM
    model: Policy = untyped.from_pretrained(folder, dtype=torch.float32)
    if recipe.lora_rank:
        model = get_peft_model(model, lora_of(recipe.lora_rank))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, recipe.learning_rate, weight_decay=0.0)
    factor = partial(learning_rate_factor, steps=recipe.steps)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def lora_of(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def learning_rate_factor(step: int, steps: int) -> float:
    """Rises over `warmup_steps` and falls linearly to a tenth, so that the last steps add little noise."""
    return min(1.0, (step + 1) / warmup_steps(steps)) * (1 - 0.9 * step / steps)


def warmup_steps(steps: int) -> int:
    return min(5, 1 + steps // 6)


def pusher(client: RolloutClient, model: Policy, adapters: bool) -> Callable[[], int]:
    """Returns a function that pushes the model as it is then, and returns the version that it has become."""
    # Sends what has changed, where that is smaller than all weights.
    changes = PolicyPusher(client)

    def push_weights() -> int:
        if not isinstance(model, PeftModel):
            return changes.push(model).version
        model.merge_adapter()
        version = changes.push(model).version
        model.unmerge_adapter()
        return version

    # A service that was running already may have the weights of an earlier training.
    base = push_weights()
    return (lambda: client.push_weights(model, kind="adapter", base=base).version) if adapters else push_weights


def no_images(rows: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: ARG001
    return {}


def images_of(client: RolloutClient, response: RolloutResponse, batch: RolloutTensors, processor: Any) -> ImageInputs:
    """Fetches each image of the rollouts once."""
    names = {name for sample in response.samples for name in images_shown(sample.message_log)}
    pictures = {name: client.image(name) for name in names}
    return lambda rows: image_inputs(response, batch, pictures, processor, rows)


def wants_reports(client: RolloutClient, asked: bool | None) -> bool:
    """Whether to report log-probabilities: as asked, and otherwise if the service compares them."""
    return client.info().keeps_records if asked is None else asked


def report_step(
    client: RolloutClient, version: int, step: int, curve: "Curve", console: Console, columns: ReportColumns
) -> None:
    """Reports what the trainer has computed with the weights of `version`, and prints each cause of a mismatch once."""
    answer = client.report_logprobs(**columns, weight_version=str(version))
    curve.ratio[step] = answer.mean_ratio
    for cause in answer.causes:
        if cause.kind not in curve.causes:
            console.print(f"Warning, {cause.kind}: {cause.message}", style="yellow")
        curve.causes[cause.kind] = cause.message


def improve(
    model: Policy,
    optimizer: torch.optim.Optimizer,
    batch: RolloutTensors,
    minibatches: int,
    images: ImageInputs = no_images,
    report: Report | None = None,
) -> float:
    """Trains `EPOCHS` times on the rollouts. Those with an advantage of zero have no gradient and are left out.

    Where all groups agree, which happens near the end of a training, nothing is left, and the model stays as it is.

    Args:
        report: gets the log-probabilities of the first minibatch.

    Returns:
        The mean distance of the log-probabilities from those of the service, on the first minibatch: the weights are
        the same there, and the rest is the rounding of bfloat16.
    """
    with_gradient = ((batch.advantages != 0) & ~says_an_image(model, batch)).nonzero()[:, 0]
    if not len(with_gradient):
        return 0.0
    difference: float | None = None
    tokens = batch.loss_mask.sum() / minibatches
    shuffled = [with_gradient[torch.randperm(len(with_gradient))].chunk(minibatches) for _ in range(EPOCHS)]
    for rows in chain.from_iterable(shuffled):
        optimizer.zero_grad()
        logprobs = add_gradients(model, batch, rows, tokens, images)
        if difference is None:
            difference = mean_distance(batch, rows, logprobs)
            if report is not None:
                report(batch.report(logprobs, rows=rows))
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
    assert difference is not None
    return difference


def mean_distance(batch: RolloutTensors, rows: torch.Tensor, logprobs: torch.Tensor) -> float:
    """The mean distance of the log-probabilities from those that the rollouts of `rows` were sampled with."""
    distances = (logprobs - batch.generation_logprobs[rows]).abs()
    return float(distances[batch.loss_mask[rows].bool()].mean())


def says_an_image(model: Policy, batch: RolloutTensors) -> torch.Tensor:
    """The rows in which the policy has sampled the placeholder of an image itself: a text for the engine, and one image
    more for transformers, which then finds fewer images than placeholders."""
    placeholder = getattr(model.config, "image_token_id", None)
    if placeholder is None:
        return torch.zeros(len(batch.input_ids), dtype=torch.bool)
    sampled: torch.Tensor = (batch.input_ids == placeholder) & batch.loss_mask.bool()
    return sampled.any(1)


def add_gradients(
    model: Policy, batch: RolloutTensors, rows: torch.Tensor, tokens: torch.Tensor, images: ImageInputs = no_images
) -> torch.Tensor:
    """Adds the gradients of PPO's clipped objective, negated, summed over the generated tokens of `rows` and divided.

    Returns:
        The log-probabilities of the generated tokens, float32 [len(rows), T]; 0 for others.
    """
    computed = torch.zeros(len(rows), batch.input_ids.shape[1])
    # Nothing before the first generated token or after the last one is in the loss.
    first = int(batch.prompt_lengths[rows].min())
    last = int(batch.loss_mask[rows].any(0).nonzero().max()) + 1
    bytes_of_a_row = (last - first) * model.config.get_text_config().vocab_size * 4
    at_once = max(1, LOGITS_BYTES // bytes_of_a_row)
    for some, kept in zip(rows.split(at_once), computed.split(at_once), strict=True):
        mask = batch.loss_mask[some, first:last].bool()
        input_ids = batch.input_ids[some, :last]
        # Padding is on the right, which causal attention does not see: no attention mask is needed.
        shown = images(some)
        for name in shown.keys() & {"mm_token_type_ids", "token_type_ids"}:
            shown[name] = shown[name][:, :last]
        output = model(input_ids=input_ids, logits_to_keep=last - first + 1, **shown)
        logits = output.logits[:, :-1][mask]
        logprobs = logits.gather(1, input_ids[:, first:][mask][:, None])[:, 0] - logits.logsumexp(-1)
        sampled_with = batch.generation_logprobs[some, first:last][mask]
        ratio = (logprobs - sampled_with).exp()
        advantages = batch.advantages[some, None].expand_as(mask)[mask]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()
        (loss / tokens).backward()
        kept[:, first:last][mask] = logprobs.detach()
    return computed


def held_out_accuracy(
    client: RolloutClient, questions: Questions, version: int, sampling: Sampling = SAMPLING
) -> float:
    """The share of the questions held out that the weights of `version` get right, from 0 to 1."""
    return mean_reward(
        client.rollout(
            questions.held_out,
            num_generations=ROLLOUTS_PER_HELD_OUT,
            sampling=sampling,
            policy={"version": version},
        )
    )


def generated_tokens(response: RolloutResponse) -> int:
    """The generated tokens of all rollouts, those of dropped groups included, and of groups that were begun ahead as if
    they had been played to their ends."""
    counted = response.metrics["total_generated_tokens"]
    assert isinstance(counted, int)
    groups = response.groups
    return counted if groups is None else counted * (groups.drawn + groups.ahead) // groups.drawn


def mean_reward(response: RolloutResponse) -> float:
    """The mean total reward of the rollouts whose reward is final. Of a failed or stale one it is unknown, not zero.

    Where groups were dropped it is that of the policy as well: over all that were drawn.
    """
    if response.groups is not None:
        mean = response.metrics["mean_total_reward"]
        assert isinstance(mean, float)
        return mean
    rewards = [reward for reward in map(final_reward, response.samples) if reward is not None]
    return sum(rewards) / len(rewards)


@contextmanager
def running_service(
    config: Callable[[], ServeDeploySchema], url: str | None, console: Console
) -> Iterator[RolloutClient]:
    """A client of the service at `url`; without a URL, a service runs for the length of the block."""
    with service_or_url(config, url, console) as address, RolloutClient(address) as client:
        client.wait_until_ready()
        yield client


@contextmanager
def service_or_url(config: Callable[[], ServeDeploySchema], url: str | None, console: Console) -> Iterator[str]:
    """The URL; without one, that of a service with the config, which runs for the length of the block."""
    with sentences_for_the_user(console):
        service = local_service(config(), console) if url is None else nullcontext(url)
        with service as address:
            yield address


@dataclass
class Curve:
    """The learning curve of one training run: shares from 0 to 1, by the number of batches trained on."""

    title: str
    held_out: dict[int, float] = field(default_factory=dict)
    """Accuracy on the questions held out, after this many batches."""
    reward: dict[int, float] = field(default_factory=dict)
    """Mean reward of each batch; the first is number 1."""
    difference: dict[int, float] = field(default_factory=dict)
    """Mean distance of the log-probabilities of trainer and service on each batch."""
    tokens: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Generated for training, up to each batch."""
    ratio: dict[int, float] = field(default_factory=dict)
    """Mean ratio of the probabilities of trainer and service on each batch, as the service has compared them."""
    causes: dict[str, str] = field(default_factory=dict)
    """Why they part, as the service says, by the kind of the cause."""

    @property
    def latest(self) -> str:
        """The latest figures as text."""
        latest = {"held-out": self.held_out, "reward": self.reward}
        figures = [f"{name} {[*shares.values()][-1]:.1%}" for name, shares in latest.items() if shares]
        figures += [f"ratio {ratio:.4f}" for ratio in [*self.ratio.values()][-1:]]
        return ", ".join(figures)

    def report(self, path: Path, console: Console) -> None:
        """Draws the curve, and prints first and last held-out accuracy to stdout as one line of JSON."""
        self.draw(path)
        console.print(f"The curve is in {path}.")
        before, *_, after = self.held_out.values()
        figures = {"held_out_before": round(before, 4), "held_out_after": round(after, 4)}
        if self.difference:
            figures["largest_mean_logprob_difference"] = round(max(self.difference.values()), 4)
        if self.ratio:
            figures["largest_mean_ratio"] = round(max(self.ratio.values()), 4)
        typer.echo(json.dumps(figures))

    def draw(self, path: Path) -> None:
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot([*self.reward], [*self.reward.values()], ".", label="mean reward", color="tab:gray", alpha=0.6)
        axes.plot([*self.held_out], [*self.held_out.values()], "o-", label="accuracy held out", color="tab:blue")
        axes.set(xlabel="batches of rollouts", ylabel="share right, at temperature 1", ylim=(0, 1), title=self.title)
        axes.grid(alpha=0.3)
        if self.difference:
            other = axes.twinx()
            other.plot([*self.difference], [*self.difference.values()], "x", color="tab:red", alpha=0.6)
            other.set(ylabel="mean distance of log-probabilities (x)", ylim=(0, None))
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def progress_bar(console: Console) -> Progress:
    """A bar that counts batches of rollouts. The field `latest` of its task is shown at the end of the line."""
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*bar, TextColumn("{task.fields[latest]}"), console=console)


if __name__ == "__main__":
    typer.run(main)

"""The command `rollout`: lists tasks, plays samples, runs a file of them, shows and changes the weights."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console

from rollout_client.base_url import DEFAULT_URL, URL_VARIABLE
from rollout_client.cli.info_table import info_table
from rollout_client.cli.policy_table import policy_tables, update_table
from rollout_client.cli.transcript import metrics_table, task_description, task_example, transcript
from rollout_client.contract import RequestMetrics, SampleResult
from rollout_client.errors import RolloutError
from rollout_client.policy_contract import PauseMode, WeightsKind
from rollout_client.priority_contract import Priority
from rollout_client.progress import rollout_bar
from rollout_client.rollout_calls import RolloutOptions
from rollout_client.sync_client.client import RolloutClient
from rollout_client.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    help="Plays rollouts at a rollout service, shows and changes its weights.",
    pretty_exceptions_show_locals=False,
)
out = Console()
DEFAULT_RETRIES = 3
"""Fewer than the library's: somebody sits before the terminal, and a wrong URL is the likeliest reason."""

Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Where the service is.")]
Retries = Annotated[int, typer.Option(min=0, help="Further attempts after one that failed in a way that may pass.")]
TimeoutS = Annotated[float | None, typer.Option(min=0, help="Seconds that each call may take.")]
NumGenerations = Annotated[int, typer.Option(min=1, help="Rollouts of each sample.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 is greedy.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of one generation.")]
MaxRolloutTurns = Annotated[int | None, typer.Option(min=1, help="Most turns of one rollout.")]


def priority_of(text: str) -> Priority:
    """The number that `text` is, or else the name; the service checks it."""
    try:
        return float(text)
    except ValueError:
        return cast(Priority, text)


PriorityOption = Annotated[
    str | None,
    typer.Option(
        "--priority", help="Share of the engines: interactive, train, batch, or a number in proportion to train."
    ),
]


def show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rollout {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plays rollouts at a rollout service, shows and changes its weights."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Write a new environment (env init NAME), or check one (env check MODULE:CLASS), without the service.",
)
def env(context: typer.Context) -> None:
    with errors_as_sentences():
        try:
            from rollout_env.__main__ import main as env_main
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("rollout env needs rollout-env: pip install ./clients/rollout_env") from error
    env_main(context.args)


@app.command()
def tasks(url: Url = DEFAULT_URL, retries: Retries = DEFAULT_RETRIES) -> None:
    """List the tasks, with a sample of each that can be posted as it is."""
    with errors_as_sentences(), RolloutClient(url, retries=retries) as client:
        for task in client.tasks():
            out.print(task_description(task))
            out.print(task_example(task), soft_wrap=True)


@app.command()
def info(url: Url = DEFAULT_URL, retries: Retries = DEFAULT_RETRIES) -> None:
    """Show which model, tokenizer, limits and versions the service has."""
    with errors_as_sentences(), RolloutClient(url, retries=retries) as client:
        out.print(info_table(client.info()))


@app.command()
def play(
    task: Annotated[str, typer.Argument(help="A name from `rollout tasks`.")],
    count: Annotated[int, typer.Option(min=1, help="Samples to play.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the samples.")] = 0,
    num_generations: NumGenerations = 1,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    max_rollout_turns: MaxRolloutTurns = None,
    priority: PriorityOption = None,
    url: Url = DEFAULT_URL,
    timeout_s: TimeoutS = None,
    retries: Retries = DEFAULT_RETRIES,
) -> None:
    """Play example samples of a TASK and show what happened."""
    options = rollout_options(num_generations, temperature, max_new_tokens, max_rollout_turns, priority)
    with errors_as_sentences(), RolloutClient(url, timeout_s=timeout_s, retries=retries) as client:
        samples = client.example_samples(task, count, seed)
        response = client.rollout(samples, progress=True, **options)
    for sample in response.samples:
        out.print(transcript(sample))
    out.print(metrics_table(response.metrics))


policy_app = typer.Typer(invoke_without_command=True)
app.add_typer(policy_app, name="policy")


@policy_app.callback()
def policy(
    context: typer.Context,
    checksums_within: Annotated[
        float,
        typer.Option(min=0, help="Have the replicas compute their checksums, and wait so many seconds for them."),
    ] = 0.0,
    url: Url = DEFAULT_URL,
    retries: Retries = DEFAULT_RETRIES,
) -> None:
    """Show which weights the service serves, and what each of its replicas has loaded."""
    if context.invoked_subcommand is None:
        with errors_as_sentences(), RolloutClient(url, retries=retries) as client:
            out.print(policy_tables(client.policy(checksums_within)))


@policy_app.command()
def rollback(
    to: Annotated[int, typer.Argument(min=0, help="A version whose weights the service still has.")],
    version: Annotated[int | None, typer.Option(min=1, help="By default one more than the newest.")] = None,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of generations under way.")] = "keep",
    url: Url = DEFAULT_URL,
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Seconds that the update may take.")] = None,
    retries: Retries = DEFAULT_RETRIES,
) -> None:
    """Make the weights of version TO current again, as a new version."""
    with errors_as_sentences(), RolloutClient(url, timeout_s=timeout_s, retries=retries) as client:
        update = client.rollback(to, version, mode=mode)
    out.print(update_table(update))


@policy_app.command()
def drop(
    name: Annotated[str, typer.Argument(help="A named policy; `rollout policy` lists them.")],
    url: Url = DEFAULT_URL,
    retries: Retries = DEFAULT_RETRIES,
) -> None:
    """Serve the policy NAME no longer. Its next version has the next number."""
    with errors_as_sentences(), RolloutClient(url, retries=retries) as client:
        client.drop_policy(name)


@app.command()
def push(
    path: Annotated[Path, typer.Argument(help="A .safetensors file, a checkpoint's folder, or an adapter's of PEFT.")],
    version: Annotated[int | None, typer.Option(min=1, help="By default one more than the newest.")] = None,
    kind: Annotated[WeightsKind, typer.Option(help="What the weights are.")] = "full",
    base: Annotated[int | None, typer.Option(min=0, help="The version that a delta changes.")] = None,
    name: Annotated[str | None, typer.Option(help="The named policy that an adapter becomes a version of.")] = None,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of generations under way.")] = "keep",
    url: Url = DEFAULT_URL,
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Seconds that the push may take.")] = None,
    retries: Retries = DEFAULT_RETRIES,
) -> None:
    """Upload the weights at PATH and have every replica serve them."""
    with errors_as_sentences(), RolloutClient(url, timeout_s=timeout_s, retries=retries) as client:
        update = client.push_weights(path, version, kind=kind, base=base, name=name, mode=mode, progress=True)
    out.print(update_table(update))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="Samples, one JSON object a line.")],
    output: Annotated[Path, typer.Option(help="Where the results go, one JSON object a line, in input order.")],
    num_generations: NumGenerations = 1,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    max_rollout_turns: MaxRolloutTurns = None,
    priority: PriorityOption = None,
    url: Url = DEFAULT_URL,
    timeout_s: TimeoutS = None,
    retries: Retries = DEFAULT_RETRIES,
) -> None:
    """Play the samples of a FILE and write the results; if it breaks midway, those that had finished are written."""
    options = rollout_options(num_generations, temperature, max_new_tokens, max_rollout_turns, priority)
    with errors_as_sentences(), RolloutClient(url, timeout_s=timeout_s, retries=retries) as client:
        metrics = run_to_file(client, samples_in(file), output, options)
    out.print(metrics_table(metrics))


def run_to_file(
    client: RolloutClient, samples: list[dict[str, Any]], output: Path, options: RolloutOptions
) -> RequestMetrics:
    """Writes the rollouts that finished to `output`, in input order, and returns the metrics."""
    by_position: dict[int, SampleResult] = {}
    with output.open("a") as results, client.stream(samples, **options) as rollouts:
        try:
            with rollout_bar(rollouts.expected) as count:
                for position, sample in rollouts.with_positions():
                    by_position[position] = sample
                    count(sample)
        finally:
            if by_position:
                # Emptied only now: a service that is down, or breaks at once, costs no earlier results.
                results.truncate(0)
                write_lines(results, (by_position[position] for position in sorted(by_position)))
        return rollouts.summary.metrics


def write_lines(file: TextIO, samples: Iterable[SampleResult]) -> None:
    for sample in samples:
        file.write(f"{sample.model_dump_json(exclude_unset=True)}\n")


def samples_in(file: Path) -> list[dict[str, Any]]:
    """Raises `ValueError` that names the line which is no JSON object, or if there is none."""
    samples = []
    with file.open() as lines:
        for line_number, line in enumerate(lines, start=1):
            if line.strip():
                samples.append(json_object(line, f"{file} line {line_number}"))
    if not samples:
        raise ValueError(f"{file} holds no samples.")
    return samples


def json_object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON: {error.msg} at column {error.colno}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no JSON object: a sample looks like `rollout tasks` shows it.")
    return value


def rollout_options(
    num_generations: int,
    temperature: float | None,
    max_new_tokens: int | None,
    max_rollout_turns: int | None,
    priority: str | None,
) -> RolloutOptions:
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    return {
        "num_generations": num_generations,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "max_rollout_turns": max_rollout_turns,
        "priority": None if priority is None else priority_of(priority),
    }


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error), error)
    except (RolloutError, ValueError, ModuleNotFoundError) as error:
        refuse(str(error), error)


def refuse(sentence: str, error: Exception) -> None:
    typer.secho(sentence, err=True, fg=typer.colors.RED)
    raise typer.Exit(1) from error

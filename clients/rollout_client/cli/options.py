"""Options that several commands have: where the service is, how it is called, and how rollouts are played."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pydantic import TypeAdapter, ValidationError

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.options import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, key_in_file
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.output import errors_as_sentences
from rollout_client.contract.base import RolloutDemand
from rollout_client.contract.rollouts import Sampling

DEFAULT_RETRIES = 3
"""Fewer than the library's: a user waits at the terminal, and a wrong URL is the likeliest reason."""

Task = Annotated[str, typer.Argument(help="A name from `rollout tasks`.")]
Seed = Annotated[int, typer.Option(min=0, help="Chooses the samples.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Begin anew in place of going on.")]
MaxErrorRate = Annotated[float, typer.Option(min=0, max=1, help="Share of failures beyond which the exit code is 3.")]
ChunkSize = Annotated[int, typer.Option(min=1, help="Samples of one request; several are under way.")]
DEFAULT_MAX_ERROR_RATE = 0.01
DEFAULT_CHUNK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the service is, and how it is called."""

    url: Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Where the service is.")] = DEFAULT_URL
    api_key_file: Annotated[Path | None, typer.Option(help=f"A file with the key; else {KEY_VARIABLE} has it.")] = None
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Seconds that each call may take.")] = None
    retries: Annotated[int, typer.Option(min=0, help="Further attempts after a transient failure.")] = DEFAULT_RETRIES

    def client(self) -> RolloutClient:
        return RolloutClient(self.url, **self._options())

    def async_client(self) -> AsyncRolloutClient:
        return AsyncRolloutClient(self.url, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"timeout_s": self.timeout_s, "retries": self.retries, "api_key": key_in_file(self.api_key_file)}


def _json_object_of(text: str) -> dict[str, Any]:
    try:
        return JSON_OBJECT.validate_json(text)
    except ValidationError as error:
        raise typer.BadParameter(f"{text} is not a JSON object: {error.errors()[0]['msg']}") from error


JSON_OBJECT = TypeAdapter(dict[str, Any])
RENAMED = {"stop": "stop_strings", "sampling_seed": "seed", "policy_name": "name", "policy_version": "version"}
"""Options of the command line whose field has another name."""


def rollout_parameters(
    num_generations: Annotated[int, typer.Option(min=1, help="Rollouts of each sample.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling (top-p).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many most likely tokens; 0 is all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Minimum probability relative to the likeliest token.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per generation.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A stop string; repeatable.")] = None,
    greedy: Annotated[bool | None, typer.Option("--greedy", help="Always take the most likely token.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", help="Generate past the end token.")] = None,
    sampling_seed: Annotated[int | None, typer.Option(help="Makes the rollouts repeatable.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Maximum tokens of a whole rollout.")] = None,
    max_rollout_turns: Annotated[int | None, typer.Option(help="Maximum turns of a rollout.")] = None,
    schedule: Annotated[str | None, typer.Option(help="async, or lockstep: rollouts wait for each other.")] = None,
    observation_format: Annotated[str | None, typer.Option(help="How observations become tokens: chat or raw.")] = None,
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, typer.Option(parser=_json_object_of, help="A JSON object, for the chat template.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(help="Seconds for the rollouts of one request.")] = None,
    sample_retries: Annotated[int | None, typer.Option(help="Retries of one sample's calls.")] = None,
    policy_name: Annotated[str | None, typer.Option(help="A named policy; `rollout policy` lists them.")] = None,
    policy_version: Annotated[int | None, typer.Option(help="Exactly this version of the policy.")] = None,
    min_version: Annotated[int | None, typer.Option(help="Wait for this version or a newer one.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Cut off rollouts that are more versions behind.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="routed_experts, top_logprobs:N, entropy, ...")] = None,
    priority: Annotated[str | None, typer.Option(help="interactive, train, batch, or a number.")] = None,
) -> RolloutOptions:
    """The options of a rollout request. The service checks their values; it chooses those that were not given."""
    given = {RENAMED.get(name, name): value for name, value in locals().items() if value not in (None, [])}
    sampling = {name: given.pop(name) for name in Sampling.model_fields if name in given}
    policy = {name: given.pop(name) for name in RolloutDemand.model_fields if name in given}
    with suppress(ValueError):
        given["priority"] = float(priority or "")
    return cast(RolloutOptions, {**given, "sampling": sampling, **({"policy": policy} if policy else {})})


MADE_FROM: dict[Any, Callable[..., Any]] = {RolloutOptions: rollout_parameters, Connection: Connection}
"""Types of parameters that stand for several options on the command line, and what makes one of those options."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command of `rollout` that talks to a service.

    A parameter of a type in `MADE_FROM` becomes the options that it is made from. An error is one sentence.
    """
    own = inspect.signature(function, eval_str=True).parameters
    makers = {name: MADE_FROM[own[name].annotation] for name in own if own[name].annotation in MADE_FROM}
    options = {name: inspect.signature(maker, eval_str=True).parameters for name, maker in makers.items()}

    @wraps(function)
    def with_options(**arguments: Any) -> None:
        with errors_as_sentences():
            for name, maker in makers.items():
                arguments[name] = maker(**{option: arguments.pop(option) for option in options[name]})
            function(**arguments)

    parameters = [parameter for name, parameter in own.items() if name not in makers]
    parameters += [parameter for made in options.values() for parameter in made.values()]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    with_options.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return with_options

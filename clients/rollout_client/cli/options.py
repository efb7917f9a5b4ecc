"""Options that several commands have: where the service is, how it is called, and how rollouts are played."""

import inspect
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.options import KEY_VARIABLE, URL_VARIABLE, key_in_file
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.contract.base import Priority

DEFAULT_RETRIES = 3
"""Fewer than the library's: somebody sits before the terminal, and a wrong URL is the likeliest reason."""

Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Where the service is.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help=f"A file with the API key, where the service asks for one; by default {KEY_VARIABLE} holds it."),
]
Retries = Annotated[int, typer.Option(min=0, help="Further attempts after one that failed in a way that may pass.")]
TimeoutS = Annotated[float | None, typer.Option(min=0, help="Seconds that each call may take.")]
MaxErrorRate = Annotated[
    float, typer.Option(min=0, max=1, help="Share of failed rollouts above which the exit code is 3.")
]
ChunkSize = Annotated[int, typer.Option(min=1, help="Samples of one request; several are under way.")]
DEFAULT_MAX_ERROR_RATE = 0.01
DEFAULT_CHUNK_SIZE = 32

SAMPLING = "sampling"
POLICY = "policy"


def client_of(url: str, api_key_file: Path | None, retries: int, timeout_s: float | None = None) -> RolloutClient:
    return RolloutClient(url, timeout_s=timeout_s, retries=retries, api_key=key_in_file(api_key_file))


def async_client_of(
    url: str, api_key_file: Path | None, retries: int, timeout_s: float | None = None
) -> AsyncRolloutClient:
    return AsyncRolloutClient(url, timeout_s=timeout_s, retries=retries, api_key=key_in_file(api_key_file))


def priority_of(text: str) -> Priority:
    """The number that `text` is, or else the name; the service checks it."""
    try:
        return float(text)
    except ValueError:
        return cast(Priority, text)


def json_object_of(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{text} is no JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text} is no JSON object")
    return value


def rollout_parameters(
    num_generations: Annotated[int, typer.Option(min=1, help="Rollouts of each sample.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the likeliest tokens.")] = None,
    top_k: Annotated[int | None, typer.Option(min=-1, help="Number of the likeliest tokens; 0 is all.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="Least share of the likeliest token.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one generation.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A stop string; can be given again.")] = None,
    greedy: Annotated[bool | None, typer.Option("--greedy", help="The likeliest token each time.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", help="Generate past the end token.")] = None,
    sampling_seed: Annotated[int | None, typer.Option(min=0, help="Makes the rollouts repeatable.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of a whole rollout.")] = None,
    max_rollout_turns: Annotated[int | None, typer.Option(min=1, help="Most turns of one rollout.")] = None,
    schedule: Annotated[
        Literal["async", "lockstep"] | None, typer.Option(help="Whether rollouts wait for each other.")
    ] = None,
    observation_format: Annotated[
        Literal["chat", "raw"] | None, typer.Option(help="How observations become tokens.")
    ] = None,
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, typer.Option(parser=json_object_of, help="A JSON object, for the chat template.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(min=0, help="Seconds for the rollouts of one request.")] = None,
    sample_retries: Annotated[
        int | None, typer.Option(min=0, help="Retries of one sample's calls after failures of the fleet.")
    ] = None,
    policy_name: Annotated[str | None, typer.Option(help="A named policy; `rollout policy` lists them.")] = None,
    policy_version: Annotated[int | None, typer.Option(min=0, help="Exactly this version of the policy.")] = None,
    min_version: Annotated[int | None, typer.Option(min=0, help="Wait for this version or a newer one.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="Cut off rollouts that are more versions behind.")
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(help="Share of the engines: interactive, train, batch, or a number in proportion to train."),
    ] = None,
) -> RolloutOptions:
    """The options of a rollout request; those that were not given are left to the service."""
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_new_tokens": max_new_tokens,
        "stop_strings": stop or None,
        "greedy": greedy,
        "ignore_eos": ignore_eos,
        "seed": sampling_seed,
    }
    policy = {
        "name": policy_name,
        "version": policy_version,
        "min_version": min_version,
        "max_staleness": max_staleness,
    }
    options: dict[str, Any] = {
        "num_generations": num_generations,
        SAMPLING: given(sampling),
        "max_seq_len": max_seq_len,
        "max_rollout_turns": max_rollout_turns,
        "schedule": schedule,
        "observation_format": observation_format,
        "chat_template_kwargs": chat_template_kwargs,
        "deadline_s": deadline_s,
        "sample_retries": sample_retries,
        POLICY: given(policy) or None,
        "priority": None if priority is None else priority_of(priority),
    }
    return cast(RolloutOptions, given(options))


def given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def plays_rollouts(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `options` becomes the options of `rollout_parameters` on the command line."""
    own = inspect.signature(command, eval_str=True).parameters
    shared = inspect.signature(rollout_parameters, eval_str=True).parameters

    @wraps(command)
    def with_options(**arguments: Any) -> None:
        options = rollout_parameters(**{name: arguments.pop(name) for name in shared})
        command(options=options, **arguments)

    parameters = [parameter for name, parameter in own.items() if name != "options"]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*parameters, *shared.values())]
    with_options.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return with_options

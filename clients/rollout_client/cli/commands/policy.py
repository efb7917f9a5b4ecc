"""`rollout policy` and `rollout push`: which weights are served, and how others take their place."""

from pathlib import Path
from typing import Annotated

import typer

from rollout_client.base_url import DEFAULT_URL
from rollout_client.cli.errors import errors_as_sentences
from rollout_client.cli.options import DEFAULT_RETRIES, ApiKeyFile, Retries, Url, client_of
from rollout_client.cli.output import AsJson, show
from rollout_client.cli.policy_table import policy_tables, update_table
from rollout_client.cli.transcript import plain
from rollout_client.contract.policy import PauseMode, WeightsKind

CHECKSUM_DIGITS = 64
policy_app = typer.Typer(invoke_without_command=True)


@policy_app.callback()
def policy(
    context: typer.Context,
    checksums_within: Annotated[
        float,
        typer.Option(min=0, help="Have the replicas compute their checksums, and wait so many seconds for them."),
    ] = 0.0,
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    retries: Retries = DEFAULT_RETRIES,
    as_json: AsJson = False,
) -> None:
    """Show which weights the service serves, and what each of its replicas has loaded."""
    if context.invoked_subcommand is None:
        with errors_as_sentences(), client_of(url, api_key_file, retries) as client:
            state = client.policy(checksums_within)
        show(state, as_json, policy_tables(state))


@policy_app.command()
def rollback(
    to: Annotated[int, typer.Argument(min=0, help="A version whose weights the service still has.")],
    version: Annotated[int | None, typer.Option(min=1, help="By default one more than the newest.")] = None,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of generations under way.")] = "keep",
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Seconds that the update may take.")] = None,
    retries: Retries = DEFAULT_RETRIES,
    as_json: AsJson = False,
) -> None:
    """Make the weights of version TO current again, as a new version."""
    with errors_as_sentences(), client_of(url, api_key_file, retries, timeout_s) as client:
        update = client.rollback(to, version, mode=mode)
    show(update, as_json, update_table(update))


@policy_app.command()
def drop(
    name: Annotated[str, typer.Argument(help="A named policy; `rollout policy` lists them.")],
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    retries: Retries = DEFAULT_RETRIES,
    as_json: AsJson = False,
) -> None:
    """Serve the policy NAME no longer. Its next version has the next number."""
    with errors_as_sentences(), client_of(url, api_key_file, retries) as client:
        client.drop_policy(name)
    show({"dropped": name}, as_json, plain(f"{name} is served no longer."))


def push(
    path: Annotated[Path, typer.Argument(help="A .safetensors file, a checkpoint's folder, or an adapter's of PEFT.")],
    version: Annotated[int | None, typer.Option(min=1, help="By default one more than the newest.")] = None,
    kind: Annotated[WeightsKind, typer.Option(help="What the weights are.")] = "full",
    base: Annotated[
        str | None,
        typer.Option(
            help="The version that a delta changes; of an adapter the number or checksum that it was trained on."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The named policy that an adapter becomes a version of.")] = None,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of generations under way.")] = "keep",
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Seconds that the push may take.")] = None,
    retries: Retries = DEFAULT_RETRIES,
    as_json: AsJson = False,
) -> None:
    """Upload the weights at PATH and have every replica serve them."""
    with errors_as_sentences(), client_of(url, api_key_file, retries, timeout_s) as client:
        named_base = int(base) if base is not None and base.isdecimal() and len(base) < CHECKSUM_DIGITS else base
        update = client.push_weights(path, version, kind=kind, base=named_base, name=name, mode=mode, progress=True)
    show(update, as_json, update_table(update))

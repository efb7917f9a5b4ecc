"""The command `rollout`: puts the commands together, those of the server's package and of rollout-env included."""

from importlib.metadata import entry_points
from typing import Annotated

import typer

from rollout_client.cli.commands.bench import bench
from rollout_client.cli.commands.conformance import conformance
from rollout_client.cli.commands.evaluate import evaluate
from rollout_client.cli.commands.play import play, view
from rollout_client.cli.commands.policy import policy_app, push
from rollout_client.cli.commands.run import run
from rollout_client.cli.commands.service import doctor, info, status, tasks
from rollout_client.cli.commands.stored import export, replay
from rollout_client.cli.output import errors_as_sentences
from rollout_client.version import __version__


def env(context: typer.Context) -> None:
    with errors_as_sentences():
        try:
            from rollout_env.__main__ import main as env_main
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("rollout env needs rollout-env: pip install ./clients/rollout_env") from error
    env_main(context.args)


SERVER_COMMANDS = "rollout_client.server_commands"
"""The group of entry points by which the server's package brings its commands."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rollout {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plays rollouts at a rollout service, shows and changes its weights."""


for command in (tasks, info, status, play, run, view, export, replay, bench, push, doctor, conformance):
    app.command()(command)
app.command("eval")(evaluate)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Write a new environment (env init NAME), or certify one (env certify MODULE:CLASS), without the service.",
)(env)
app.add_typer(policy_app, name="policy")


def add_server_commands(to: typer.Typer) -> None:
    """Adds what only a machine of the service can do, where the server's package is installed."""
    found = entry_points(group=SERVER_COMMANDS)
    for entry in found:
        to.command(entry.name)(entry.load())
    if not found:
        to.command("serve", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
            _explain_serve
        )


def _explain_serve() -> None:
    """Runs a service on this machine: needs the server's package."""
    typer.echo('`rollout serve` needs the server: pip install "rollout-service[gpu]", or [cpu].', err=True)
    raise typer.Exit(1)


add_server_commands(app)

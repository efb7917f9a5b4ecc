"""`rollout env`: the commands of rollout-env, which work without the service."""

import typer

from rollout_client.cli.errors import errors_as_sentences


def env(context: typer.Context) -> None:
    with errors_as_sentences():
        try:
            from rollout_env.__main__ import main as env_main
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("rollout env needs rollout-env: pip install ./clients/rollout_env") from error
    env_main(context.args)

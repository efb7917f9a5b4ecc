"""`python -m service CONFIG`: runs the service on this machine until it is interrupted."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from service.startup.config import given_access, read_config, set_access
from service.startup.local_service import sentences_for_the_user, serve_until_stopped
from service.startup.serve_command import GuardedBy, Host, KeysFile, Port


def _main(
    config: Annotated[Path, typer.Argument(help="A Serve config, such as serve_config.cpu.yaml.")],
    host: Host = None,
    port: Port = None,
    keys_file: KeysFile = None,
    guarded_by: GuardedBy = None,
) -> None:
    console = Console(stderr=True)
    with sentences_for_the_user(console):
        serve_config = read_config(config, host, port)
        set_access(serve_config, given_access(keys_file, guarded_by))
        serve_until_stopped(serve_config, console)


if __name__ == "__main__":
    typer.run(_main)

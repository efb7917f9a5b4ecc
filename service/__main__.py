"""`python -m service CONFIG`: runs the service on this machine until it is interrupted."""

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from service.local import local_service, sentences_for_the_user
from service.startup.config import read_config
from service.startup.readiness import ROOM_TIMEOUT_S


def main(
    config: Annotated[Path, typer.Argument(help="A Serve config, such as serve_config.cpu.yaml.")],
    host: Annotated[str | None, typer.Option(help="Listen on this address instead of the config's.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Listen on this port instead of the config's.")
    ] = None,
    room_timeout_s: Annotated[
        float, typer.Option(min=0, help="Give up if a deployment waits longer than this for free cores or GPUs.")
    ] = ROOM_TIMEOUT_S,
) -> None:
    console = Console(stderr=True)
    with (
        sentences_for_the_user(console),
        local_service(read_config(config, host, port), console, room_timeout_s) as url,
    ):
        console.print(f"Routes and their fields: {url}/docs. Ctrl-C stops the service.")
        threading.Event().wait()


if __name__ == "__main__":
    typer.run(main)

"""Starts the service, puts it under load with locust, and stops everything; the exit code is locust's."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from service.local import local_service, sentences_for_the_user
from service.startup.config import read_config
from service.startup.ports import free_port

LOCUSTFILE = Path(__file__).resolve().parent.parent / "clients" / "locustfile.py"


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    users: Annotated[int, typer.Option(min=1, help="Concurrent callers.")] = 16,
    seconds: Annotated[int, typer.Option(min=1, help="Length of the load.")] = 30,
) -> None:
    console = Console()
    with sentences_for_the_user(console), local_service(read_config(config, port=free_port()), console) as url:
        locust = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url]
        load = [*locust, "-u", str(users), "-r", str(users), "-t", f"{seconds}s", "--only-summary"]
        exit_code = subprocess.run(load, check=False).returncode
    raise typer.Exit(exit_code)


if __name__ == "__main__":
    typer.run(main)

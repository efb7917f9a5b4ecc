"""Starts the service, puts it under load with locust, and stops everything. The exit code is that of locust.

Learn from it how many requests this machine answers, and how fast. The load itself is `clients/locustfile.py`.
"""

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
        console.print(f"Load of {users} users for {seconds} s; the figures come at the end")
        exit_code = subprocess.run(load, check=False).returncode
    raise typer.Exit(exit_code)


if __name__ == "__main__":
    typer.run(main)

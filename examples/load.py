"""Starts the service, puts it under load with locust, and stops everything. The exit code is that of locust.

Learn from it how many requests this machine answers, and how fast. The load itself is `clients/locustfile.py`, which
has more options: `python -m examples.load --users 8 -- --max-p95-s 10 --html load.html`.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

LOCUSTFILE = Path(__file__).resolve().parent.parent / "clients" / "locustfile.py"


def main(
    more: Annotated[list[str] | None, typer.Argument(help="Config of the service, then options of locust.")] = None,
    users: Annotated[int, typer.Option(min=1, help="Concurrent callers.")] = 16,
    seconds: Annotated[int, typer.Option(min=1, help="Length of the load.")] = 30,
    classes: Annotated[str, typer.Option(help="Who calls, with shares.")] = "interactive=3,groups,multi-turn,streaming",
) -> None:
    console = Console()
    config, options = arguments(more or [])
    with sentences_for_the_user(console):
        serve_config = read_config(config, port=free_port())
        needed = prepared(serve_config, classes)
        with local_service(serve_config, console) as url:
            locust = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url]
            load = [*locust, "-u", str(users), "-r", str(users), "-t", f"{seconds}s", "--only-summary"]
            console.print(f"Load of {users} users for {seconds} s; the figures come at the end")
            command = [*load, "--classes", classes, *needed, *options]
            exit_code = subprocess.run(command, check=False).returncode
    raise typer.Exit(exit_code)


def arguments(given: list[str]) -> tuple[Path, list[str]]:
    """The config, by default that of processors, and what is locust's."""
    if given and not given[0].startswith("-"):
        return Path(given[0]), given[1:]
    return Path("serve_config.cpu.yaml"), given


def prepared(config: ServeDeploySchema, classes: str) -> list[str]:
    """Gives the service what the classes need of it; returns the options that they need of locust."""
    [application] = config.applications
    args: dict[str, Any] = application.args
    if "agent" in classes:
        args.setdefault("sessions", {})
    # The weights that the service has already, each time as a new version.
    return ["--push-weights", str(args["engine"]["model"])] if "pusher" in classes else []


if __name__ == "__main__":
    typer.run(main)

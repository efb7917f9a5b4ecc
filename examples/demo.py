"""Plays samples of several tasks with a service that starts for them, of a config and of `examples/tasks.yaml`.

Learn from `play` (service/startup/demo_command.py) how one request mixes tasks, what a rollout looks like, and which
metrics a request has.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.stand_ins import stand_ins
from examples.task_configs import config_for, tasks_of, temperature_of
from service.startup.demo_command import play, show
from service.startup.local_service import local_service, sentences_for_the_user


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    model: Annotated[Path | None, typer.Option(help="Folder of a model, in place of the config's.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Of the config or of examples/tasks.yaml.")] = None,
) -> None:
    console = Console()
    tasks = task or tasks_of(model)
    with (
        sentences_for_the_user(console),
        stand_ins(config_for(config, model, tasks)) as served,
        local_service(served, console) as url,
    ):
        response = play(url, tasks, console, temperature_of(model))
    show(response, tasks, console)


if __name__ == "__main__":
    typer.run(main)

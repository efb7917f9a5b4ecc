"""Serves a model with the tasks that it can play, of a config, `examples/models.yaml` and `examples/tasks.yaml`.

Learn from it which parts of a config another model changes. `rollout serve MODEL` needs no config at all.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.stand_ins import stand_ins
from examples.task_configs import config_for, tasks_of
from service.startup.local_service import sentences_for_the_user, serve_until_stopped


def main(
    config: Annotated[Path, typer.Argument()],
    model: Annotated[Path, typer.Option(help="Folder of a model, in place of the config's.")],
    task: Annotated[list[str] | None, typer.Option(help="Of the config or of examples/tasks.yaml.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    console = Console(stderr=True)
    tasks = task or tasks_of(model)
    with sentences_for_the_user(console), stand_ins(config_for(config, model, tasks, port)) as served:
        serve_until_stopped(served, console)


if __name__ == "__main__":
    typer.run(main)

"""Trains an agent on tasks in Harbor's format by GRPO: `make train-agent TASK=harbor`.

Learn from it how a data set of Harbor is trained on: the loop is that of `train_grpo.py`, unchanged. The service gives
each rollout a sandbox, runs the agent in a session, and lets the task's verifier score what the agent has left.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from examples import harbor_functions
from examples.task_configs import CONFIG, ConfigArgument
from examples.train_agent import LEARNING_RATE, MODEL, NEEDED_GAIN, STEPS, gain, service_config
from examples.train_grpo import Curve, CurveOption, Recipe, SeedOption, running_service, train

TASKS = 1000
"""A tenth of them is held out: played twice, the standard error of the accuracy is at most 3.5 percentage points."""
TASK_NAME = "harbor"
RECIPE = Recipe("", STEPS, 16, 8, 2, LEARNING_RATE, 0, 5, max_new_tokens=96)


def main(
    config: ConfigArgument = CONFIG,
    steps: Annotated[int, typer.Option(min=1)] = RECIPE.steps,
    tasks: Annotated[int, typer.Option(min=10, help="Of the data set; each tenth is held out.")] = TASKS,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train-agent-harbor.png"),
) -> None:
    """Trains and measures; ends with exit code 1 if held-out tasks gain less than 20 percentage points."""
    console = Console(stderr=True)
    with TemporaryDirectory() as folder:
        trained = trained_on(Path(folder), config, RECIPE._replace(steps=steps), tasks, seed, console)
    trained.report(curve, console)
    raise typer.Exit(code=int(gain(trained) < NEEDED_GAIN))


def trained_on(folder: Path, config: Path, recipe: Recipe, tasks: int, seed: int, console: Console) -> Curve:
    """Writes the data set of the seed into the folder, serves it, and trains on its samples."""
    data_set = folder / "tasks"
    harbor_functions.write_tasks(data_set, tasks, seed)
    questions = folder / "samples.jsonl"
    with running_service(partial(config_with, config, data_set), None, console) as client:
        samples = client.example_samples(TASK_NAME, count=tasks)
        questions.write_text("".join(f"{sample.model_dump_json(exclude_unset=True)}\n" for sample in samples))
        trained = train(client, str(MODEL), recipe._replace(questions=str(questions)), False, seed, console)
    trained.title = f"GRPO: {MODEL.name}, {tasks} tasks in Harbor's format"
    return trained


def config_with(path: Path, data_set: Path) -> ServeDeploySchema:
    """The config with the embedded model, sessions, and the data set as a task."""
    config = service_config(path)
    [application] = config.applications
    application.args["environments"][TASK_NAME] = {
        "agent": {
            "harbor": {"tasks": str(data_set)},
            "import_path": f"{harbor_functions.__name__}:{harbor_functions.agent.__name__}",
            "timeout_s": 120.0,
        }
    }
    return config


if __name__ == "__main__":
    typer.run(main)

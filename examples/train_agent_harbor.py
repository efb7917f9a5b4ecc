"""Trains an agent on tasks in Harbor's format by GRPO: `python -m examples.train_agent_harbor`.

Learn from it how a data set of Harbor is trained on: the loop is that of `train_grpo.py`, unchanged. The service gives
each rollout a sandbox, runs the agent in a session, and lets the task's verifier score what the agent has left.
"""

import argparse
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from ray.serve.schema import ServeDeploySchema

from examples import harbor_functions
from examples.task_configs import CONFIG
from examples.train import report, running_service
from examples.train_agent import RECIPE, service_config
from examples.train_grpo import Figures, parser, train
from rollout_client import RolloutClient

TASKS = 1000
"""A tenth of them is held out: played twice, the standard error of the accuracy is at most 3.5 percentage points."""
TASK_NAME = "harbor"


def trained_on(folder: Path, config: Path, options: argparse.Namespace, tasks: int = TASKS) -> list[Figures]:
    """Writes the data set of the seed into the folder, serves it, and trains on its samples."""
    data_set = folder / "tasks"
    harbor_functions.write_tasks(data_set, tasks, options.seed)
    options.questions = folder / "samples.jsonl"
    with running_service(config_with(config, data_set)) as url, RolloutClient(url) as client:
        samples = client.example_samples(TASK_NAME, count=tasks)
        options.questions.write_text("".join(f"{sample.model_dump_json(exclude_unset=True)}\n" for sample in samples))
        return train(options, client)


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


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seed", default="0", help="Of the data set and of the order of its tasks.")
    seed = arguments.parse_args().seed
    options = parser().parse_args([*RECIPE, "--measure-every=5", f"--seed={seed}"])
    with TemporaryDirectory() as folder:
        history = trained_on(Path(folder), CONFIG, options)
    report(history, f"GRPO: {TASKS} tasks in Harbor's format", Path("train-agent-harbor.png"))


if __name__ == "__main__":
    main()

"""Deploys a Serve config on the Ray node that runs here, and returns when the service is ready.

`python -m tests.endurance.chaos.nodes.deploying CONFIG ADDRESS`, on the head node, whose Ray has this address: other
clusters may run on the machine. It is a program, because Ray is reached from its node alone.
"""

from pathlib import Path
from typing import Annotated

import ray
import typer

from service.startup.config import read_config
from service.startup.readiness import deploy, deployments_not_ready


def main(config: Annotated[Path, typer.Argument()], address: Annotated[str, typer.Argument()]) -> None:
    ray.init(address=address, namespace="serve", log_to_driver=False)
    settings = read_config(config)
    deploy(settings)
    for _ in deployments_not_ready(settings):
        pass


if __name__ == "__main__":
    typer.run(main)

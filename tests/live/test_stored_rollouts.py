"""Stored rollouts of a running service with a simulated engine: exported."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console
from typer.testing import CliRunner

from rollout_client import RolloutClient
from rollout_client.cli.app import app
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.paths import REPOSITORY

MATH = "deployments.tasks.math:MathEnvironment"


@pytest.fixture(scope="module")
def config() -> ServeDeploySchema:
    config = read_config(REPOSITORY / "serve_config.scale.yaml", port=free_port())
    [application] = config.applications
    application.args["environments"] = {
        "math": {"import_path": MATH},
    }
    application.args["jobs"] = {}
    application.deployments = [
        *(deployment for deployment in application.deployments if deployment.name == "Ingress"),
        DeploymentSchema(name="Generator", num_replicas=1),
        *(
            DeploymentSchema(name=name, ray_actor_options=RayActorOptionsSchema(num_cpus=0.1))
            for name in application.args["environments"]
        ),
    ]
    return config


@pytest.fixture(scope="module")
def url(config: ServeDeploySchema) -> Iterator[str]:
    with local_service(config, Console(stderr=True)) as running:
        yield running


@pytest.fixture
def client(url: str) -> Iterator[RolloutClient]:
    with RolloutClient(url) as client:
        yield client


def test_a_job_is_exported_from_the_service(client: RolloutClient, url: str, tmp_path: Path) -> None:
    samples = client.example_samples("math", count=2)
    job = client.jobs.submit(samples, num_generations=2, sampling={"max_new_tokens": 4})
    output = tmp_path / "rows.jsonl"
    arguments = ["export", "--job", job.job_id, "--format", "tokens", "--output", str(output), "--url", url, "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 4
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [sum(label != -100 for label in row["labels"]) for row in rows] == [4] * 4

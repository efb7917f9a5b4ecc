"""`rollout serve`, a plug-in of the client's command line."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import typer
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from rollout_client.cli import app as command_line
from service.startup import local_service
from service.startup.generated_config import EMBEDDED_MODEL, EMBEDDED_MODEL_THAT_SEES
from service.startup.serve_command import make_importable, serve
from tests.paths import REPOSITORY


def invoke(*arguments: str) -> tuple[int, str, str]:
    command = typer.Typer()
    command.command()(serve)
    done = CliRunner().invoke(command, arguments)
    return done.exit_code, done.stdout, done.stderr


def test_a_models_folder_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    _, printed, _ = invoke("mine", "--gpus", "1", "--print-config")
    assert yaml.safe_load(printed)["applications"][0]["args"]["engine"]["model"] == str(tmp_path / "mine")
    _, printed, _ = invoke("org/model", "--gpus", "1", "--print-config")
    assert yaml.safe_load(printed)["applications"][0]["args"]["engine"]["model"] == "org/model"


@pytest.mark.parametrize(
    ("options", "model", "tasks", "takes_images"),
    [
        (["models/shapes"], str(REPOSITORY / "models" / "shapes"), ["shapes"], True),
        (["--env", "shapes"], str(EMBEDDED_MODEL_THAT_SEES), ["shapes"], True),
        (["--env", "shapes", "--env", "math"], str(EMBEDDED_MODEL), ["shapes", "math"], False),
        (["models/shapes", "--env", "math"], str(REPOSITORY / "models" / "shapes"), ["math"], True),
        (["org/model"], "org/model", ["math", "sliding_puzzle"], False),
    ],
)
def test_a_model_that_sees_is_served_with_images(
    options: list[str], model: str, tasks: list[str], takes_images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    _, printed, _ = invoke(*options, "--gpus", "0", "--print-config")
    args = yaml.safe_load(printed)["applications"][0]["args"]
    assert (args["engine"]["model"], [*args["environments"]]) == (model, tasks)
    assert args.get("images") == ({} if takes_images else None)


def test_environments_of_the_working_directory_are_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/one"])
    monkeypatch.setenv("PYTHONPATH", "/two")
    make_importable(tmp_path)
    assert sys.path == [str(tmp_path), "/one"]
    monkeypatch.delenv("PYTHONPATH")
    make_importable(tmp_path)


def test_the_generated_config_is_that_which_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServeDeploySchema] = []
    monkeypatch.setattr(local_service, "serve_until_stopped", lambda config, *_: served.append(config))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    options = ("--env", "math", "--port", "9000", "--gpus", "0")
    code, _, _ = invoke(*options)
    _, printed, _ = invoke(*options, "--print-config")
    [config], [application] = served, yaml.safe_load(printed)["applications"]
    assert (code, config.http_options.host, config.http_options.port) == (0, "127.0.0.1", 9000)
    assert config.applications[0].args == application["args"]


def test_the_servers_package_brings_the_command() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"][command_line.SERVER_COMMANDS]["serve"].partition(":")
    assert getattr(import_module(module), function) is serve


def test_without_the_servers_package_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "entry_points", lambda group: [])  # noqa: ARG005
    alone = typer.Typer()
    alone.callback()(lambda: None)
    command_line.add_server_commands(alone)
    done = CliRunner().invoke(alone, ["serve", "org/model", "--env", "math"])
    assert done.exit_code == 1
    assert done.stderr == '`rollout serve` needs the server: pip install "rollout-service[gpu]", or [cpu].\n'

"""The tasks of demos, and the page of all tasks."""

from pathlib import Path

import pytest

from examples.task_configs import config_for, known_tasks
from rollout_env.loading import checked_arguments, load_environment_class
from service.settings import EnvironmentSettings
from service.startup.config import ServiceNotStarted
from service.startup.generated_config import EMBEDDED_MODEL_THAT_SEES
from tests.paths import REPOSITORY

CONFIG = REPOSITORY / "serve_config.cpu.yaml"


@pytest.mark.parametrize("task", known_tasks())
def test_every_task_of_the_demos_can_be_named_in_a_config(task: str) -> None:
    entry = {name: value for name, value in known_tasks()[task].items() if name != "needs"}
    settings = EnvironmentSettings.model_validate(entry)
    checked_arguments(load_environment_class(settings.import_path), settings.arguments, settings.import_path)


def test_a_demo_serves_its_tasks_alone() -> None:
    [application] = config_for(CONFIG, Path("models/tiny"), ["code", "math"]).applications
    assert list(application.args["environments"]) == ["code", "math"]
    assert application.args["environments"]["code"] == known_tasks()["code"]
    assert [entry.name for entry in application.deployments] == ["Ingress", "Generator", "code", "math"]
    assert application.args["engine"]["model"] == str(Path("models/tiny").resolve())


def test_a_game_is_served_with_sessions_and_the_deployment_that_plays_it() -> None:
    [application] = config_for(CONFIG, None, ["nim", "math"]).applications
    assert application.args["sessions"] == {}
    assert [entry.name for entry in application.deployments] == ["Ingress", "Generator", "nim", "math", "nim_agent"]


def test_a_task_with_images_is_played_by_the_model_that_sees() -> None:
    [application] = config_for(CONFIG, None, ["shapes"]).applications
    assert application.args["engine"]["model"] == str(EMBEDDED_MODEL_THAT_SEES)
    assert application.args["images"] == {}
    [application] = config_for(CONFIG, Path("models/shapes"), ["shapes", "math"]).applications
    assert application.args["engine"]["model"] == str(Path("models/shapes").resolve())
    assert application.args["images"] == {}
    for others in (["shapes", "math"], ["math"]):
        [application] = config_for(CONFIG, None, others).applications
        assert Path(application.args["engine"]["model"]).name == "tiny"
        assert "images" not in application.args


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ServiceNotStarted, match="There is no task 'chess'; there are math, sliding_puzzle, code,"):
        config_for(CONFIG, None, ["chess"])


def test_a_task_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.task_configs.find_spec", lambda _name: None)
    monkeypatch.setattr("examples.task_configs.ENVIRONMENTS", Path("/nowhere"))
    for task in ("gymnasium", "openenv"):
        says = rf"The task {task} needs {task}, which is not installed: see docs/tasks.md"
        with pytest.raises(ServiceNotStarted, match=says):
            config_for(CONFIG, None, [task])

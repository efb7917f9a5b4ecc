"""The tasks of demos, and the page of all tasks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from examples.task_configs import config_for, known_tasks, missing_package
from examples.task_page import LONGEST_TEXT, fields_table, played, task_section, transcript
from rollout_client import RolloutClient
from rollout_client.contract.info import TaskInfo
from rollout_client.contract.rollouts import SampleInput, SampleResult
from rollout_env.loading import checked_arguments, load_environment_class
from service.settings import EnvironmentSettings
from service.startup.config import ServiceNotStarted
from service.startup.generated_config import EMBEDDED_MODEL_THAT_SEES
from tests.clients.message_logs import generated, given_message, rollout
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


def test_a_task_that_shows_images_is_played_by_the_embedded_model_that_sees() -> None:
    [application] = config_for(CONFIG, None, ["shapes"]).applications
    assert application.args["engine"]["model"] == str(EMBEDDED_MODEL_THAT_SEES)
    assert application.args["images"] == {}
    [application] = config_for(CONFIG, Path("models/shapes"), ["shapes", "math"]).applications
    assert (application.args["engine"]["model"], application.args["images"]) == (
        str(Path("models/shapes").resolve()),
        {},
    )
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
        with pytest.raises(
            ServiceNotStarted, match=rf"The task {task} needs {task}, which is not installed: see docs/bridges.md"
        ):
            config_for(CONFIG, None, [task])


def test_a_package_in_a_python_environment_of_its_own_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("examples.task_configs.ENVIRONMENTS", tmp_path)
    assert missing_package("openenv") == "openenv"
    python = tmp_path / "openenv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert missing_package("openenv") is None


def test_only_agents_who_take_their_turns_by_themselves_are_played_without_lockstep() -> None:
    schedules: list[str] = []

    class Client:
        def example_samples(self, _task: str, _count: int) -> list[SampleInput]:
            return []

        def rollout(self, _samples: list[SampleInput], *, schedule: str, **_options: Any) -> Any:
            schedules.append(schedule)
            return SimpleNamespace(samples=[rollout(generated(1))])

    for name in ("math", "nim", "a task of a service at --url"):
        played(
            cast(RolloutClient, Client()),
            TaskInfo(task_name=name, description="", fields={}, example=SampleInput(task_name=name)),
        )
    assert schedules == ["lockstep", "async", "lockstep"]


def section(sample: SampleResult, **fields: Any) -> str:
    task = TaskInfo(
        task_name="sums",
        description="Add.",
        fields=dict(fields),
        tools=[{"type": "function", "function": {"name": "add"}}],
        example=SampleInput(task_name="sums"),
    )
    return "".join(task_section(task, sample))


def test_a_section_has_the_task_its_tools_and_a_transcript() -> None:
    sample = rollout(
        given_message(1) | {"content": "1 + 1?"},
        generated(2, content="2", finish_reason="stop", reward=1.0),
        rewards={"right": 1.0},
    )
    text = section(sample)
    assert text.startswith("\n## sums\n\nAdd.\n\nTools: `add`.\n\n```text\n[user]\n1 + 1?\n[assistant] ")
    assert text.endswith("\n2\n```\n\n`completed` after 1 turn, rewards: `right` 1.\n")


def test_images_of_a_message_are_marked() -> None:
    shown = {"media": f"sha256:{'c' * 64}", "start": 0, "end": 1}
    lines = "".join(transcript(rollout(given_message(1) | {"content": "Look.", "mm_ranges": [shown]}))).splitlines()
    assert lines[1:4] == ["[user]", "[image sha256:cccccccc... · 1 token]", "Look."]


def test_the_fields_are_a_table() -> None:
    properties: dict[str, Any] = {
        "left": {"type": "integer", "description": "The first\nnumber | digit."},
        "rest": {"type": "array", "items": {"type": "integer"}},
    }
    task = TaskInfo(
        task_name="sums",
        description="Add.",
        fields={"properties": properties, "required": ["left"]},
        example=SampleInput(task_name="sums"),
    )
    assert "".join(fields_table(task)).splitlines()[2:4] == [
        "| `left` | integer (required) | The first number \\| digit. |",
        "| `rest` | array of integer |  |",
    ]


def test_a_transcript_is_fenced_shortened_and_shows_control_characters() -> None:
    sample = rollout(given_message() | {"content": "````\x1b[2J"}, generated(content="x" * (LONGEST_TEXT + 1)))
    lines = "".join(transcript(sample)).splitlines()
    assert (lines[0], lines[2]) == ("`````text", "````\u241b[2J")
    assert lines[4] == f"{'x' * LONGEST_TEXT} ... ({LONGEST_TEXT + 1} characters)"

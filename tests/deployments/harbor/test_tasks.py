"""Tasks in Harbor's format: what is read of them, and which are refused."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from deployments.agents.settings import AgentSettings
from deployments.harbor.tasks import (
    LARGEST_REWARD_BYTES,
    MOST_REWARDS,
    HarborSettings,
    HarborTaskRefused,
    HarborTasks,
    _load_task,
    _load_tasks,
    rewards_in,
)
from service.settings import HARBOR_TASKS, EnvironmentSettings
from tests.paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "harbor"
COMMAND: Any = {"argv": ["true"], "sandbox": True}


def task(folder: Path, toml: str = "", instruction: str = "Do it.", name: str = "t") -> Path:
    (folder / name / "tests").mkdir(parents=True)
    (folder / name / "task.toml").write_text(toml)
    (folder / name / "instruction.md").write_text(instruction)
    (folder / name / "tests" / "test.sh").write_text("#!/bin/bash\n")
    return folder / name


def named_numbers(count: int) -> bytes:
    """A `reward.json`."""
    return json.dumps({f"n{number}": number for number in range(count)}).encode()


def test_tasks_are_the_folders_of_a_folder_or_the_folder_of_one() -> None:
    found = _load_tasks(HarborSettings(tasks=str(EXAMPLES)))
    assert list(found) == [f"examples/{name}" for name in ("count-lines", "fix-median", "greet-server")]
    [one] = _load_tasks(HarborSettings(tasks=str(EXAMPLES / "fix-median"))).values()
    assert (one.config.environment.memory_mb, one.config.agent.timeout_sec) == (512, 300.0)


def test_samples_are_the_tasks_in_order_and_begin_again_after_the_last() -> None:
    tasks = HarborTasks({"tasks": str(EXAMPLES)})
    made = tasks.example_samples(3, seed=2)
    assert tasks.sample_count == 3
    names = [sample["extra_env_info"]["task"] for sample in made]
    assert names == [f"examples/{name}" for name in ("greet-server", "count-lines", "fix-median")]
    assert made[1]["messages"][0]["content"].startswith("The folder /app/books holds text files.")


def test_older_names_of_sizes_and_of_the_network_are_understood(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false'
    environment = _load_task(task(tmp_path, toml)).config.environment
    assert (environment.memory_mb, environment.storage_mb, environment.wants_network) == (2048, 512, False)
    assert _load_task(task(tmp_path, name="u")).config.environment.wants_network is True


def test_a_folder_without_tasks_or_with_two_of_one_name_is_refused(tmp_path: Path) -> None:
    for name in ("u", "v"):
        task(tmp_path / "two", '[task]\nname = "a/b"', name=name)
    with pytest.raises(HarborTaskRefused, match="are both named a/b"):
        _load_tasks(HarborSettings(tasks=str(tmp_path / "two")))
    with pytest.raises(HarborTaskRefused, match="is no folder of tasks"):
        _load_tasks(HarborSettings(tasks=str(tmp_path / "nowhere")))
    with pytest.raises(HarborTaskRefused, match="has no tasks"):
        _load_tasks(HarborSettings(tasks=str(tmp_path / "two" / "u" / "tests")))


@pytest.mark.parametrize(
    ("marked", "instruction"),
    [
        ("<!-- harbor-canary GUID 1 -->\n# canary 2\n\nDo it.\n# canary", "Do it.\n# canary"),
        ("  <!-- canary --> \n \n    indented\n", "    indented\n"),
        ("# canary", ""),
    ],
)
def test_marks_of_a_benchmark_are_no_part_of_an_instruction(marked: str, instruction: str, tmp_path: Path) -> None:
    assert _load_task(task(tmp_path, instruction=marked)).instruction == instruction


@pytest.mark.parametrize("section", ["environment", "verifier"])
def test_variables_come_from_this_process_if_passed_or_from_their_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: Literal["environment", "verifier"]
) -> None:
    monkeypatch.setenv("KNOWN", "k")
    monkeypatch.setenv("SECRET", "s")

    def variables(text: str, name: str, *passed: str) -> dict[str, str]:
        folder = task(tmp_path, f'[{section}.env]\nA = "{text}"', name=name)
        [one] = _load_tasks(HarborSettings(tasks=str(folder), passed_variables=list(passed))).values()
        return dict(getattr(one.config, section).env)

    assert variables("x${KNOWN}y${NONE:-d}", "a", "KNOWN") == {"A": "xkyd"}
    assert variables("$SECRET $(SECRET)", "b") == {"A": "$SECRET $(SECRET)"}
    with pytest.raises(HarborTaskRefused, match=rf"toml: {section}\.env\.A of the task c asks for the variable NONE"):
        variables("${NONE}", "c", "NONE")
    for text, name in (("${SECRET}", "d"), ("${KNOWN}${SECRET:-d}", "e"), ("x${SECRET}y", "f")):
        said = (
            rf"/{name}/task\.toml: {section}\.env\.A of the task {name} asks for the variable SECRET of the service's "
            r"process: set it where the service starts and name it in harbor\.passed_variables"
        )
        with pytest.raises(HarborTaskRefused, match=said):
            variables(text, name, "KNOWN", "SECRE")
    with pytest.raises(HarborTaskRefused, match=r"asks for the variable NONE of"):
        _load_task(task(tmp_path, f'[{section}.env]\nA = "${{NONE}}"', name="g"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("task.toml", '[[steps]]\nname = "one"', "toml: steps: .*docs/sandboxes.md says what is played"),
        ("task.toml", '[environment]\nos = "Windows"', "toml: environment.os"),
        ("task.toml", "[environment]\ngpus = 1", "toml: environment.gpus"),
        ("task.toml", '[environment]\nnetwork_mode = "allowlist"', "toml: environment.network_mode"),
        ("task.toml", '[[environment.mcp_servers]]\nname = "m"', "toml: environment.mcp_servers"),
        ("task.toml", '[environment.healthcheck]\ncommand = "true"', "toml: environment.healthcheck"),
        ("task.toml", '[agent]\nuser = "someone"', "toml: agent.user"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"', "toml: verifier.environment_mode"),
        ("task.toml", '[verifier]\nnetwork_mode = "public"', "toml: verifier.network_mode"),
        ("task.toml", "[verifier]\ntimeout_sec = 0", "verifier.timeout_sec: Input should be greater than 0"),
        ("task.toml", "[environment]\ncpus = 0", "environment.cpus: Input should be greater than 0"),
        ("task.toml", "[environment]\nstorage_mb = -1", "environment.storage_mb: Input should be greater than 0"),
        ("task.toml", b"# d\xe9j\xe0", r"/t/task\.toml is not UTF-8: .*0xe9"),
        ("instruction.md", b"d\xe9j\xe0", r"/t/instruction\.md is not UTF-8: .*0xe9"),
        ("task.toml", "a = " + "1" * 5000, r"/t/task\.toml is not TOML: Exceeds the limit"),
        ("task.toml", "a = " + "[" * 5000, r"/t/task\.toml is not TOML: maximum recursion"),
        ("task.toml", '[environment]\nmemory = "1e999G"', r"/t/task\.toml: environment: .*memory must be a number"),
        ("task.toml", "[environment]\ncpus = inf", r"/t/task\.toml: environment\.cpus: Input should be a finite"),
        ("tests/test.sh", None, r"has no tests/test\.sh"),
        ("instruction.md", None, r"/t/instruction\.md cannot be read: .*No such file"),
    ],
)
def test_a_task_that_cannot_be_read_or_played_is_refused(
    tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    path = task(tmp_path) / name
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(HarborTaskRefused, match=message):
        _load_tasks(HarborSettings(tasks=str(tmp_path)))


def test_rewards_are_read_as_harbor_reads_them() -> None:
    assert rewards_in(b" 0.5\n", "reward.txt") == {"reward": 0.5}
    assert rewards_in(b'{"reward": 1, "speed": true}', "reward.json") == {"reward": 1.0, "speed": 1.0}
    assert len(rewards_in(named_numbers(MOST_REWARDS), "reward.json")) == MOST_REWARDS
    assert rewards_in(b" " * (LARGEST_REWARD_BYTES - 1) + b"1", "reward.txt") == {"reward": 1.0}


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"{}", "reward.json", r"^reward\.json must hold a finite number, .* got b'{}'$"),
        (b'{"a": NaN}', "reward.json", "got b'{\"a\": NaN}'$"),
        (b"\xff", "reward.json", r"got b'\\xff'$"),
        (b"[" * 3000, "reward.json", r"^reward\.json must hold"),
        (b'{"a": "1"}', "reward.json", "must hold"),
        (b"inf", "reward.txt", "must hold"),
        (b"high", "reward.txt", r"^reward\.txt must hold a finite number, .* got b'high'$"),
        (b"1" * 400, "reward.txt", r"got b'1{200}'$"),
        (b" " * LARGEST_REWARD_BYTES + b"1", "reward.txt", r"^reward\.txt must hold .* in at most 65536 bytes"),
        (named_numbers(MOST_REWARDS + 1), "reward.json", r"^reward\.json must hold .* an object of 1 to 1000 of them"),
    ],
)
def test_what_is_no_reward_is_named_with_the_file_of_the_verifier(content: bytes, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewards_in(content, name)


def test_a_task_type_of_harbor_is_described_by_its_agent_alone() -> None:
    agent: Any = {"harbor": {"tasks": str(EXAMPLES)}, "command": COMMAND}
    settings = EnvironmentSettings(agent=agent)
    assert (settings.import_path, settings.arguments["settings"]["tasks"]) == (HARBOR_TASKS, str(EXAMPLES))
    assert settings.agent is not None
    assert settings.agent.scored_by == "agent"
    with pytest.raises(ValidationError, match="the verifier of a Harbor task judges it"):
        EnvironmentSettings(import_path="a:B", agent=agent)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scored_by": "environment", "command": COMMAND}, "leave scored_by out"),
        ({"harness": {"url": "http://harness.test/"}}, "name a function that takes the sandbox"),
        ({"game": {"import_path": "a:B"}}, "name a function that takes the sandbox"),
        ({"command": {"argv": ["true"]}}, "a command with sandbox: true"),
        ({"command": COMMAND | {"passed_variables": ["A"]}}, "by environment_variables alone"),
    ],
)
def test_what_means_nothing_beside_harbor_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AgentSettings(harbor=HarborSettings(tasks=str(EXAMPLES)), **given)

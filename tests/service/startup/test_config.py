"""What a Serve config may say, and where the environment variables for Ray come from."""

import os
from pathlib import Path

import pytest

from service.startup.config import ServiceNotStarted, config_of, free_port, given_access, read_config, set_access
from tests.paths import REPOSITORY


def refusal(path: Path) -> str:
    with pytest.raises(ServiceNotStarted) as raised:
        read_config(path)
    return str(raised.value)


def test_host_and_port_replace_those_of_the_config() -> None:
    options = read_config(REPOSITORY / "serve_config.cpu.yaml", host="0.0.0.0", port=4321).http_options
    assert (options.host, options.port) == ("0.0.0.0", 4321)
    options = read_config(REPOSITORY / "serve_config.cpu.yaml").http_options
    assert (options.host, options.port) == ("127.0.0.1", 8000)


def test_a_config_that_names_no_host_listens_on_loopback(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("http_options: {port: 1234}\napplications: []")
    assert read_config(path).http_options.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, ": [Errno 2] No such file or directory: "),
        ("applications: 3", ":\n  applications: Input should be a valid list (given: 3)"),
        *((content, ":\n  : Input should be a valid dictionary") for content in ("", "just words", "- a\n- list")),
        ("applications: [", ": while parsing"),
    ],
)
def test_what_is_no_config_is_refused_with_the_place(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    if content is not None:
        path.write_text(content)
    assert refusal(path).startswith(f"{path} is not a Serve config{says}")


def test_a_key_that_serve_would_ignore_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "misspelled.yaml"
    path.write_text(
        "applications:\n- import_path: service.app:build\n  deployments:\n"
        "  - {name: math, ray_actor_options: {num_cpu: 1}}\nhttp_options: {prot: 80}\n"
    )
    assert refusal(path).splitlines() == [
        f"{path} is not a Serve config:",
        "  http_options.prot: unknown to Ray Serve (given: 80)",
        "  applications.0.deployments.0.ray_actor_options.num_cpu: unknown to Ray Serve (given: 1)",
    ]


def test_the_environment_file_beside_the_config_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ALREADY_SET", "before")
    monkeypatch.delenv("TEST_NOT_SET", raising=False)
    (tmp_path / "serve.env").write_text("TEST_ALREADY_SET=file\nTEST_NOT_SET=file\n")
    config_of({"applications": []}, tmp_path / "config.yaml")
    assert os.environ["TEST_ALREADY_SET"] == "before"
    assert os.environ.pop("TEST_NOT_SET") == "file"


def test_a_config_elsewhere_gets_the_packages_environment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", raising=False)
    config_of({"applications": []}, tmp_path / "config.yaml")
    assert os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


def test_the_files_of_data_are_relative_to_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "applications:\n- import_path: service.app:build\n  args:\n    environments:\n"
        "      one: {data: {files: rows/*.jsonl}}\n"
        "      two: {data: {files: {train: [a.jsonl, /b.jsonl], test: 3}}}\n"
        "      three: {data: {hub: {name: a/b}}}\n"
        "      four: 4\n"
        "      five: {agent: {harbor: {tasks: tasks}}}\n"
    )
    [application] = read_config(path).applications
    assert application.args["environments"] == {
        "one": {"data": {"files": f"{tmp_path}/rows/*.jsonl"}},
        "two": {"data": {"files": {"train": [f"{tmp_path}/a.jsonl", "/b.jsonl"], "test": 3}}},
        "three": {"data": {"hub": {"name": "a/b"}}},
        "four": 4,
        "five": {"agent": {"harbor": {"tasks": f"{tmp_path}/tasks"}}},
    }


def test_the_paths_of_models_are_relative_to_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("models/mine", "configs/models/mine", "tokenizers/mine"):
        (tmp_path / folder).mkdir(parents=True)
    path = tmp_path / "configs" / "config.yaml"
    path.write_text(
        "applications:\n- import_path: service.app:build\n  args:\n"
        "    engine: {model: models/mine, tokenizer: tokenizers/mine}\n"
    )
    [application] = read_config(path).applications
    assert application.args == {
        "engine": {"model": f"{tmp_path}/configs/models/mine", "tokenizer": f"{tmp_path}/tokenizers/mine"}
    }


def test_a_keys_file_is_relative_to_the_config_or_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    access = "{keys_file: k.yaml}"
    path.write_text(f"applications: [{{import_path: 'service.app:build', args: {{access: {access}}}}}]")
    config = read_config(path)
    [application] = config.applications
    assert application.args["access"] == {"keys_file": str(tmp_path / "k.yaml")}
    set_access(config, given_access(None, "a gateway"))
    assert application.args["access"] == {"keys_file": str(tmp_path / "k.yaml"), "guarded_by": "a gateway"}
    set_access(config, given_access(tmp_path / "other.yaml", None))
    assert application.args["access"]["keys_file"] == str(tmp_path / "other.yaml")


def test_a_free_port_is_none_that_the_system_gives_to_others() -> None:
    for _ in range(50):
        assert 20_000 <= free_port() < 32_768

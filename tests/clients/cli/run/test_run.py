"""`rollout run`: what it writes, how it goes on, and with which code it ends."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fastapi.responses import Response
from typer.testing import CliRunner, Result

from rollout_client import read_rollouts
from rollout_client.cli.app import app
from tests.clients.scripted_service import (
    DIED,
    REJECTED,
    Json,
    ScriptedService,
    lines_of,
    ndjson,
    problem,
    result,
    sample,
)


class Run:
    """A run of three samples with two generations each, into one file."""

    def __init__(self, service: ScriptedService, folder: Path) -> None:
        self.service = service
        self.output = folder / "results.jsonl"
        self.samples = folder / "samples.jsonl"
        self.samples.write_text("\n".join(json.dumps(sample()) for _ in range(3)))

    def __call__(self, *options: str) -> Result:
        arguments = ["run", str(self.samples), "--output", str(self.output), "--num-generations", "2", *options]
        return CliRunner().invoke(app, [*arguments, "--url", self.service.url], env={"COLUMNS": "200"})

    def played(self) -> list[tuple[int, int]]:
        lines = map(json.loads, self.output.read_text().splitlines())
        return [(line["input_row"], line["generation_index"]) for line in lines]


@pytest.fixture
def run(service: ScriptedService, tmp_path: Path) -> Run:
    return Run(service, tmp_path)


EVERY = [(row, generation) for row in range(3) for generation in range(2)]


def broken(body: Json) -> Response:
    """A stream that ends after half of the first group."""
    return ndjson({"position": 0, "sample": result(body["samples"][0]["idx"], 0)})


def test_each_rollout_is_a_line_with_its_row_and_the_totals_are_printed(run: Run) -> None:
    done = run("--json", "--chunk-size", "2", "--stop", "a", "--stop", "b")
    assert done.exit_code == 0
    assert sorted(run.played()) == EVERY
    assert json.loads(done.stdout) == {
        "rollouts": 6,
        "statuses": {"completed": 6},
        "error_rate": 0.0,
        "mean_reward": 1.0,
        "clipped_ratio": 0.0,
        "tokens": 12,
        "output": str(run.output),
    }
    assert sorted(len(body["samples"]) for body in run.service.bodies) == [1, 2]
    assert run.service.bodies[0]["sampling"] == {"stop_strings": ["a", "b"]}
    assert [rollout.total_reward for rollout in read_rollouts(run.output)] == [1.0] * 6
    assert "mean reward 1.000" in done.stderr


def test_every_option_of_a_rollout_is_sent(run: Run) -> None:
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_new_tokens": 8, "seed": 7}
    sampling: Json = {**numbers, "stop_strings": ["a"], "greedy": True, "ignore_eos": True}
    others: Json = {
        "max_seq_len": 100,
        "max_rollout_turns": 2,
        "schedule": "lockstep",
        "observation_format": "raw",
        "chat_template_kwargs": {"enable_thinking": False},
        "deadline_s": 9.0,
        "retries": 1,
        "policy": {"name": "run-b", "version": 3, "min_version": 2, "max_staleness": 1},
        "priority": 0.5,
    }
    options = (
        "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --max-new-tokens 8 --stop a --greedy --ignore-eos "
        "--sampling-seed 7 --max-seq-len 100 --max-rollout-turns 2 --schedule lockstep --observation-format raw "
        "--deadline-s 9 --sample-retries 1 --policy-name run-b --policy-version 3 --min-version 2 --max-staleness 1 "
        "--priority 0.5"
    )
    done = run(*options.split(), "--chat-template-kwargs", '{"enable_thinking": false}')
    assert done.exit_code == 0, done.stderr
    [body] = run.service.bodies
    samples = body.pop("samples")
    assert body == {"num_generations": 2, "sampling": sampling, **others}
    assert len({posted["seed"] for posted in samples}) == 3


def test_a_run_that_failed_goes_on_with_what_is_missing(run: Run) -> None:
    run.service.rollouts.extend([lambda body: ndjson(*lines_of(body)), lambda _: problem(REJECTED)])
    assert run("--chunk-size", "1").exit_code == 1
    before = len(run.played())
    sent = len(run.service.bodies)
    assert run("--chunk-size", "1").exit_code == 0
    assert sorted(run.played()) == EVERY
    assert len(run.service.bodies) - sent == 3 - before // 2
    assert run("--chunk-size", "1").exit_code == 0
    assert sorted(run.played()) == EVERY


def test_a_refused_sample_is_named_by_its_row(run: Run) -> None:
    run()
    run.output.write_bytes(run.output.read_bytes()[:1])
    [error] = REJECTED["errors"]
    named = REJECTED | {"errors": [error | {"field": "samples[2].task_name"}]}
    run.service.rollouts.append(lambda _: problem(named))
    done = run()
    assert done.exit_code == 1
    assert "row 2.task_name: there is no task 'maths'" in done.stderr


def test_the_half_group_of_a_broken_stream_is_played_again(run: Run) -> None:
    run.service.rollouts.append(broken)
    assert run("--retries", "1").exit_code == 0
    assert sorted(run.played()) == EVERY


def test_streams_that_go_on_breaking_end_the_run(run: Run) -> None:
    run.service.rollouts.extend([broken] * 2)
    done = run("--retries", "1")
    assert done.exit_code == 1
    assert "The stream ended after 1 of 6 rollouts" in done.stderr
    assert run.played() == []


@pytest.mark.parametrize(("rate", "exit_code"), [("0.49", 3), ("0.5", 0)])
def test_more_failures_than_allowed_are_another_exit_code(run: Run, rate: str, exit_code: int) -> None:
    def half(body: Json) -> Response:
        lines = lines_of(body)
        for line in lines[:3]:
            line["sample"] |= {"status": "error", "total_reward": None, "error": DIED}
        return ndjson(*lines)

    run.service.rollouts.append(half)
    assert run("--max-error-rate", rate).exit_code == exit_code
    assert run("--max-error-rate", rate).exit_code == exit_code
    assert len(run.service.bodies) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--temperature", "0.5"], "is of a run with other options"),
        (["--task", "math"], ""),
        (["--priority", "batch"], ""),
    ],
)
def test_other_options_are_refused_unless_rollouts_stay_the_same(run: Run, change: list[str], sentence: str) -> None:
    run()
    again = run(*change)
    assert again.exit_code == (1 if sentence else 0)
    assert sentence in again.stderr
    assert run(*change, "--overwrite").exit_code == 0
    assert sorted(run.played()) == EVERY


def test_other_samples_are_refused(run: Run) -> None:
    run()
    run.samples.write_text(json.dumps(sample(id="other")))
    assert "is of a run with other samples. Begin anew with --overwrite" in run().stderr


def test_a_file_of_something_else_is_left_alone(run: Run) -> None:
    run.output.write_text("of somebody\n")
    done = run()
    assert (done.exit_code, run.service.bodies) == (1, [])
    assert "exists, but results.jsonl.run.json, which names its run, does not" in done.stderr
    assert run.output.read_text() == "of somebody\n"


def test_two_runs_do_not_write_one_file(run: Run) -> None:
    with run.output.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = run()
    assert (done.exit_code, run.service.bodies) == (1, [])
    assert "is being written by another rollout run." in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_of_2000_prompts_that_is_killed_5_times_has_each_once(service: ScriptedService, tmp_path: Path) -> None:
    samples, output = tmp_path / "samples.jsonl", tmp_path / "results.jsonl"
    samples.write_text("\n".join(json.dumps(sample()) for _ in range(2000)))
    arguments = [str(samples), "--output", str(output), "--url", service.url]
    command = [sys.executable, "-m", "rollout_client", "run", *arguments]
    for kill in range(1, 6):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
            while killed.returncode is None and line_count(output) < 200 * kill:
                with suppress(subprocess.TimeoutExpired):
                    killed.wait(0.02)
            os.kill(killed.pid, signal.SIGKILL)
        assert killed.returncode == -signal.SIGKILL
        assert 200 * kill <= line_count(output) < 2000
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rollouts = list(read_rollouts(output))
    assert sorted((rollout.model_extra or {})["input_row"] for rollout in rollouts) == list(range(2000))


def line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0

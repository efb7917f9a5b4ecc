"""The command `rollout` and what it prints, against a scripted service, on a terminal of 80 columns."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load, save_file
from typer.testing import CliRunner

from rollout_client.cli.app import app
from rollout_client.cli.commands.policy import policy_tables
from rollout_client.cli.transcript import metrics_table, transcript
from rollout_client.contract.messages import MediaRange
from rollout_client.contract.policy import NamedPolicyState, PolicyState, VersionInfo
from rollout_client.contract.rollouts import SampleResult
from rollout_client.version import CONTRACT_VERSION
from tests.clients.cli.command_line import rollout, rows_of
from tests.clients.scripted_policy import ScriptedPolicy, serving
from tests.clients.scripted_service import INFO, ScriptedService, result, sample

ROOT = Path(__file__).resolve().parents[3]


def shown(renderable: Any) -> str:
    console = Console(width=80, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def samples_file(folder: Path, *lines: str) -> str:
    file = folder / "samples.jsonl"
    file.write_text("\n".join(lines))
    return str(file)


# Commands


def test_info_shows_model_tokenizer_limits_and_versions(service: ScriptedService) -> None:
    follow = {"folder": "/w", "taken": 1, "newest": 2, "refused": [{"version": 2, "reason": "Torn."}]}
    service.info = INFO | {"follow": follow}
    rows = rows_of(rollout(service, "info").stdout)
    assert rows[:2] == [["model.name", "org/model"], ["model.revision", "4e20de"]]
    assert ["limits.max_seq_len", "100"] in rows
    assert [row for row in rows if row[0].startswith("limits.admission")] == [["limits.admission.max_rollouts", "9"]]
    assert ["tasks", "math, [code]"] in rows
    assert ["follow.refused", "{'version': 2, 'reason': 'Torn.'}"] in rows
    assert rows[-1] == ["client", f"{version('rollout-client')}, contract {CONTRACT_VERSION}"]


def test_tasks_shows_each_task_with_its_fields_and_an_example(service: ScriptedService) -> None:
    done = rollout(service, "tasks")
    assert (done.exit_code, done.stdout[:8]) == (0, "math ───")
    assert "ground_truth  string or array of integer  required  The [right] answer." in done.stdout
    assert json.loads(done.stdout[done.stdout.index("{") :]) == sample(note="long " * 40)


def test_play_shows_transcripts_rewards_and_metrics(service: ScriptedService) -> None:
    options = "--count 2 --num-generations 2 --temperature 1.0 --max-new-tokens 64 --seed 9 --priority interactive"
    done = rollout(service, "play", "math", *options.split(), "--include", "top_logprobs:3", columns=80)
    assert (done.exit_code, done.stdout.count("completed · reward 1 · 1 turn")) == (0, 4)
    assert "1 · math · generation 1" in done.stdout
    assert "mean_total_reward          │ 0.500" in done.stdout
    assert re.search(r"4/4 rollouts, [\d,]+ tokens/s, mean reward 1\.000, 0 failed", done.stderr)
    assert max(map(len, done.output.splitlines())) <= 80
    assert service.bodies == [
        {
            "samples": [sample(seed=9)] * 2,
            "num_generations": 2,
            "sampling": {"temperature": 1.0, "max_new_tokens": 64},
            "include": ["top_logprobs:3"],
            "priority": "interactive",
        }
    ]


@pytest.fixture
def served_policy() -> Iterator[ScriptedPolicy]:
    with serving(ScriptedPolicy(layout={"a.weight": ("BF16", [2, 3])})) as policy:
        yield policy


def test_policy_shows_versions_and_replicas(served_policy: ScriptedPolicy) -> None:
    served_policy.checksum_of = lambda version, _content: f"{version}" * 64
    served_policy.versions[3] = b""
    done = rollout(served_policy, "policy", "--checksums-within", "2.5")
    assert done.exit_code == 0
    assert "Version 3 is current" in done.stdout
    assert [row for row in rows_of(done.stdout) if "full" in row] == [
        ["0", "full", "", "", "2026-01-01 00:00:00", "000000000000"],
        ["3", "full", "", "", "2026-01-01 00:00:00", "333333333333"],
    ]
    assert "Replicas" in done.stdout
    assert served_policy.asked == ["/policy?checksums_within_s=2.5"]


def test_dates_and_numbers_of_versions_are_whole_on_80_columns() -> None:
    created_at = datetime(2026, 11, 25, 9, 8, 7, tzinfo=UTC)
    known = VersionInfo(version=120_700, kind="adapter", base=100_000, size_bytes=269_000_000, created_at=created_at)
    versions = [VersionInfo(version=0, kind="initial"), known]
    assert rows_of(shown(policy_tables(PolicyState(current=120_700, versions=versions, replicas=[])))) == [
        ["0", "initial", *[""] * 4],
        ["120700", "adapter", "100000", "269.0 MB", "2026-11-25 09:08:07", ""],
    ]


def test_rollback_makes_an_older_version_current_again(served_policy: ScriptedPolicy) -> None:
    served_policy.versions[3] = b"old"
    done = rollout(served_policy, "policy", "rollback", "3", "--version", "9", "--mode", "wait")
    assert (done.exit_code, served_policy.rollbacks) == (0, [({"mode": "wait"}, {"to": 3, "version": 9})])
    assert done.output.startswith("Version 9 is current")
    assert served_policy.versions == {0: b"", 3: b"old", 9: b"old"}


def test_push_uploads_a_file_and_says_how_it_went(served_policy: ScriptedPolicy, tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "a.safetensors")
    done = rollout(served_policy, "push", str(tmp_path / "a.safetensors"), "--version", "5", "--mode", "abort")
    assert (done.exit_code, served_policy.puts[0].query) == (0, {"kind": "full", "mode": "abort"})
    assert f"Version 5 is current, {len(served_policy.puts[0].body)} bytes sent, " in done.stdout
    assert "version 5: loaded" in done.stderr
    assert load(served_policy.content(5))["a.weight"].tolist() == [[1.0] * 3] * 2


def test_an_adapter_is_pushed_to_a_named_policy_shown_dropped(served_policy: ScriptedPolicy, tmp_path: Path) -> None:
    save_file({"lora_A": torch.ones(2, 3)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    served_policy.base, served_policy.warnings = 3, ["It is served on other weights."]
    options = ["--kind", "adapter", "--name", "run-b", "--version", "5", "--base", "3"]
    done = rollout(served_policy, "push", str(tmp_path), *options)
    assert (done.exit_code, served_policy.puts[0].query) == (
        0,
        {"kind": "adapter", "name": "run-b", "mode": "keep", "base": "3"},
    )
    assert done.stdout.startswith("Version 5 is current on the full weights of version 3, ")
    assert "It is served on other weights." in done.stdout
    served_policy.named = [NamedPolicyState(name="run-b", current=5, base=3, next_version=6, checksum="a" * 64)]
    assert ["run-b", "5", "3", "", "", "aaaaaaaaaaaa"] in rows_of(rollout(served_policy, "policy").stdout)
    dropped = rollout(served_policy, "policy", "drop", "run-b", "--json")
    assert (dropped.exit_code, json.loads(dropped.stdout)) == (0, {"dropped": "run-b"})
    assert served_policy.dropped == ["/policy/names/run-b"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("b.safetensors", "The weights are not those of the model that the service serves; nothing was sent. "),
        ("none", "none: No such file or directory"),
    ],
)
def test_a_bad_push_is_one_sentence(served_policy: ScriptedPolicy, tmp_path: Path, name: str, sentence: str) -> None:
    save_file({"b": torch.ones(1)}, tmp_path / "b.safetensors")
    done = rollout(served_policy, "push", str(tmp_path / name))
    assert (done.exit_code, done.stdout, served_policy.puts) == (1, "", [])
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


# Errors


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (['\ufeff{"task_name": '], "line 1 is not JSON: Expecting value: line 1 column 15 (char 14)."),
        ([json.dumps(sample()), "[]"], "line 2 is not a JSON object: a sample looks like `rollout tasks` shows it."),
        ([""], "holds no samples."),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_the_line(
    service: ScriptedService, tmp_path: Path, lines: list[str], sentence: str
) -> None:
    file = samples_file(tmp_path, *lines)
    done = rollout(service, "run", file, "--output", str(tmp_path / "results.jsonl"))
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"{file} {sentence}\n")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            None,
            "The request is not valid; nothing was started (422): samples[0].task_name: there is no task 'maths'; "
            "the known ones are math (got 'maths')",
        ),
        ("here", "'here' is not the URL of a service; it must look like http://127.0.0.1:8000."),
    ],
)
def test_an_unknown_task_or_a_bad_url_is_one_sentence(service: ScriptedService, url: str | None, sentence: str) -> None:
    service.url = url or service.url
    done = rollout(service, "play", "maths")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"{sentence}\n")


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"rollout {version('rollout-client')}\n")


WITHOUT_ITS_EXTRA = "import sys; sys.modules['typer'] = None; from rollout_client.__main__ import main; main()"
UNHEARD = ("-m", "rollout_client", "tasks", "--url", "http://127.0.0.1:9", "--retries", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (UNHEARD, "http://127.0.0.1:9 cannot be reached: [Errno 111] Connection refused"),
        (("-c", WITHOUT_ITS_EXTRA), 'The command line needs typer: pip install "rollout-client[cli]"'),
    ],
)
def test_a_program_that_cannot_go_on_says_why_in_a_sentence(command: tuple[str, ...], sentence: str) -> None:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{sentence}\n")


# Transcripts


FAILED = {"kind": "environment", "message": "The [checker] died.", "retryable": True}


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"content": "[bold]x[/bold] [/red] [link=http://a]"}, ["[bold]x[/bold] [/red] [link=http://a]"]),
        ({"content": "\x1b[2Jgone\r\x07"}, ["␛[2Jgone␍␇"]),
        ({}, ["2 tokens · stop · mean log-probability -0.500 · reward 1"]),
        (
            {"status": "error", "error": FAILED, "total_reward": None},
            ["environment: The [checker] died.", "error · no reward · 1 turn"],
        ),
    ],
)
def test_a_transcript_shows_texts_as_they_are_and_how_they_ended(fields: dict[str, Any], lines: list[str]) -> None:
    text = shown(transcript(SampleResult(**result(**fields))))
    assert [line for line in lines if line in text] == lines
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_a_transcript_marks_each_image_of_a_message_before_its_text() -> None:
    sample = SampleResult(**result())
    ranges = [MediaRange(media=f"sha256:{digit * 64}", start=1, end=end) for digit, end in (("a", 19), ("b", 2))]
    log = [message.model_copy(update={"mm_ranges": ranges}) for message in sample.message_log[:1]]
    text = shown(transcript(sample.model_copy(update={"message_log": log})))
    lines = [line.strip("│ ").removeprefix(log[0].role).strip() for line in text.splitlines()]
    assert lines[1:3] == ["[image sha256:aaaaaaaa... · 18 tokens]", "[image sha256:bbbbbbbb... · 1 token]"]
    assert lines[3] == log[0].content


def test_a_long_transcript_stays_within_its_columns() -> None:
    text = shown(transcript(SampleResult(**result(content="word " * 100 + "x" * 200))))
    assert (max(map(len, text.splitlines())), text.count("x") >= 200) == (80, True)


def test_metrics_are_whole_or_have_three_decimals() -> None:
    metrics: Any = {"total_turns": 12345.0, "mean_total_reward": 1 / 3, "per_worker_token_counts": {"x7": 2345}}
    names = ("total_turns", "mean_total_reward", "per_worker_token_counts/x7")
    assert rows_of(shown(metrics_table(metrics))) == [*map(list, zip(names, ("12,345", "0.333", "2,345"), strict=True))]


# Environments


def test_env_passes_its_arguments_on(tmp_path: Path) -> None:
    written = CliRunner().invoke(app, ["env", "init", "cli_game", "--folder", str(tmp_path)])
    assert (written.exit_code, (tmp_path / "cli_game.py").exists()) == (0, True)
    assert "check" in CliRunner().invoke(app, ["env", "--help"]).output


def test_a_key_comes_from_a_file_and_is_no_argument(service: ScriptedService, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("rollout-key\n")
    play = ["run", samples_file(tmp_path, json.dumps(sample())), "--output", str(tmp_path / "results.jsonl")]
    assert rollout(service, *play, "--api-key-file", str(tmp_path / "key")).exit_code == 0
    assert service.headers[-1]["authorization"] == "Bearer rollout-key"
    missing = rollout(service, *play, "--api-key-file", str(tmp_path / "none"))
    assert (missing.exit_code, missing.stderr) == (1, f"{tmp_path}/none: No such file or directory\n")

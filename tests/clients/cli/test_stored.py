"""`rollout export` and `replay`: which stored rollouts they read, what they write and say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from typer.testing import CliRunner, Result

from rollout_client.cli.app import app
from tests.clients.cli.command_line import rollout, rows_of
from tests.clients.data_out.responses import response_of
from tests.clients.scripted_service import SUMMARY, Json, ndjson, result, served

PAIR = [result(0, 0), result(0, 1, "\\boxed{3}", total_reward=0.0)]
PAIR[1]["message_log"][1]["content"] = "\\boxed{3}"
LOST = result(1, total_reward=None, status="error")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    response_of(*PAIR, LOST).save(path)
    return path


def exported(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "120"})


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_export_writes_the_rows_and_says_what_is_in_none_and_why(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "pairs.jsonl"
    done = exported(str(file), "--format", "dpo", "--output", str(output))
    assert done.exit_code == 0, done.stderr
    assert rows_of(done.stdout) == [["rows", "1"], ["rollouts", "3"], ["left out: status error", "1"]]
    [row] = lines_of(output)
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("\\boxed{2}", "\\boxed{3}")


def test_export_prints_a_document_with_json_and_takes_every_option(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = ["--best-of-group", "--min-reward", "0.5", "--turns", "last", "--status", "completed"]
    done = exported(str(file), "--format", "tokens", "--output", str(output), *options, "--json")
    assert json.loads(done.stdout) == {
        "format": "tokens",
        "output": str(output),
        "rows": 1,
        "rollouts": 3,
        "left_out": {"a reward below 0.5": 1, "status error": 1},
        "notes": {},
    }
    assert lines_of(output) == [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["{file}", "--format", "dpo", "--min-gap", "2", "--output", "{out}"],
            "Nothing can be exported as dpo: 1 left out: status error; "
            "2 left out: no other response to its prompt has a reward that differs by 2.",
        ),
        (
            ["--format", "sft", "--output", "{out}"],
            "Name a file of rollouts, or a job of the service with --job: one of both.",
        ),
        (
            ["{file}", "--format", "sft", "--output", "{file}"],
            "{file} holds the rollouts: name another file for the rows.",
        ),
    ],
)
def test_an_export_that_cannot_be_is_one_sentence_and_writes_nothing(
    file: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    names = {"file": str(file), "out": str(tmp_path / "out.jsonl")}
    done = exported(*(argument.format(**names) for argument in arguments))
    assert (done.exit_code, done.stderr) == (1, sentence.format(**names) + "\n")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_status_that_there_is_not_is_a_wrong_argument(file: Path, tmp_path: Path) -> None:
    done = exported(str(file), "--format", "sft", "--output", str(tmp_path / "out.jsonl"), "--status", "done")
    assert done.exit_code == 2
    assert "done is not a status; there are completed, truncated" in " ".join(done.stderr.replace("│", "").split())


class JobServer:
    """Has one job, with the events that a test gives it."""

    def __init__(self) -> None:
        self.url = ""
        self.acknowledged = 0
        self.events: list[Json] = []
        self.app = FastAPI()

        @self.app.get("/jobs/j1")
        async def status() -> Response:
            fields = {"state": "completed", "request_id": "r1", "created_at": 1.0, "last_event": 2}
            return JSONResponse({"job_id": "j1", "acknowledged": self.acknowledged, **fields})

        @self.app.get("/jobs/j1/events")
        async def events(after: int) -> Response:
            return ndjson(*self.events[after:])


@pytest.fixture
def jobs() -> Iterator[JobServer]:
    server = JobServer()
    with served(server.app) as server.url:
        yield server


def test_a_job_is_exported_with_all_of_its_groups(jobs: JobServer, tmp_path: Path) -> None:
    group = [{"position": place, "sample": sample} for place, sample in enumerate(PAIR)]
    jobs.events = [{"event": 1, "samples": group}, {"event": 2, "summary": SUMMARY}]
    output = tmp_path / "pairs.jsonl"
    done = rollout(jobs, "export", "--job", "j1", "--format", "dpo", "--output", str(output))
    assert done.exit_code == 0, done.stderr
    assert [row["prompt"][0]["content"] for row in lines_of(output)] == ["What is 1 + 1?"]


def test_export_writes_the_images_into_a_folder_and_asks_once_for_each(jobs: JobServer, tmp_path: Path) -> None:
    rollouts, output, folder = tmp_path / "seen.jsonl", tmp_path / "rows.jsonl", tmp_path / "images"
    samples = [result(0, generation) for generation in range(2)]
    kept, gone = (f"sha256:{digit * 64}" for digit in "ab")
    for played, name in zip([*samples, late := result(1)], (kept, kept, gone), strict=True):
        played["message_log"][0]["mm_ranges"] = [{"media": name, "start": 0, "end": 1}]
    response_of(*samples, late).save(rollouts)
    asked: list[str] = []

    @jobs.app.get("/blobs/{name}")
    def blob(name: str) -> Response:
        asked.append(name)
        if name == kept:
            return Response(b"\x89PNG", media_type="image/png")
        return JSONResponse({"title": "Gone", "status": 404}, 404)

    export = ["export", str(rollouts), "--format", "sft", "--output", str(output), "--images", str(folder)]
    for _ in range(2):
        done = rollout(jobs, *export)
        assert done.exit_code == 0, done.stderr
        assert rows_of(done.stdout)[2] == ["left out: an image that the service does not have any more", "1"]
    file = folder / f"{'a' * 64}.png"
    assert [row["images"] for row in lines_of(output)] == [[str(file)]] * 2
    assert file.read_bytes() == b"\x89PNG"
    assert asked == [kept, gone, gone]
    assert [path.name for path in folder.iterdir()] == [file.name]


def test_a_job_that_failed_or_was_acknowledged_is_not_exported_in_part(jobs: JobServer, tmp_path: Path) -> None:
    lost = {"type": "about:blank", "title": "Lost", "status": 503, "detail": "The job was lost."}
    jobs.events = [{"event": 1, "problem": lost}]
    export = ["export", "--job", "j1", "--format", "sft", "--output", str(tmp_path / "rows.jsonl")]
    assert rollout(jobs, *export).stderr == "Lost (503): The job was lost.\n"
    jobs.acknowledged = 1
    done = rollout(jobs, *export)
    assert (done.exit_code, done.stderr.partition(",")[0]) == (1, "Job j1: its events up to 1 were acknowledged")


REPLAYED = {
    "request_id": "r",
    "rollout_id": "a-0-0",
    "verdict": "parts",
    "tokens": 4,
    "largest_difference": 0.25,
    "generations": [{"message": 1, "start": 0, "end": 9, "weight_version": "7", "verdict": "parts", "tokens": 4}],
    "difference": {
        "message": 1,
        "token": 4,
        "recorded_id": 9,
        "recorded_text": "x",
        "recorded_logprob": -0.6931472,
        "replayed_id": 12,
        "replayed_text": "y",
        "replayed_logprob": -0.1053605,
    },
    "notes": ["The engine had up to 3 generations at once: that alone may change log-probabilities."],
}


@pytest.mark.parametrize(("name", "place"), [("1", 1), ("a-0-0", 0)])
def test_replay_shows_a_parting_with_both_probabilities(jobs: JobServer, name: str, place: int, tmp_path: Path) -> None:
    posted: list[Json] = []

    @jobs.app.post("/replay")
    async def replay(body: Json) -> Json:
        posted.append(body)
        return REPLAYED

    saved = response_of(result(0, rollout_id="a-0-0"), result(1))
    saved.save(tmp_path / "rollouts.jsonl")
    done = rollout(jobs, "replay", str(tmp_path / "rollouts.jsonl"), name)
    assert done.exit_code == 1, done.stderr
    assert [body["rollout"]["idx"] for body in posted] == [place]
    shown = " ".join(done.stdout.split())
    parts = ["it parts", "message 1, token 4", "9 'x', probability 0.5", "12 'y', probability 0.9"]
    assert [part for part in parts if part in shown] == parts


def test_replay_of_an_unknown_rollout_is_one_sentence(file: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(file), "none"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "has no rollout none: name a rollout_id of it, or a row from 0 to" in done.stderr

"""`rollout story`: what it shows of the record of a rollout; and the ids that `rollout view` shows."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from typer.testing import CliRunner

from rollout_client import RolloutResponse
from rollout_client.cli.app import app
from rollout_client.cli.commands.story import duration
from rollout_client.contract.records import RolloutRecord
from tests.clients.cli.command_line import rollout, rows_of
from tests.clients.scripted_service import SUMMARY, Json, problem, result, served

ID = "step/1-0a-0-0"
DIED = "The generator replica died."
PROMPT, RESPONSE = result()["message_log"]
FIRST = {
    **RESPONSE,
    "weight_versions": [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}],
}
RECORD: Json = {
    "rollout": result(rollout_id=ID, message_log=[PROMPT, FIRST, PROMPT, RESPONSE]),
    "request_id": "step/1",
    "group_id": "g",
    "priority": "train",
    "began_at": 1764200000.0,
    "ended_at": 1764200010.0,
    "generations": [
        {"message": 1, "start": 0, "end": 2, "replica": "a", "waited_s": 0.25, "took_s": 1.5, "began_at": 1764200000.0},
        {
            **{"message": 3, "start": 0, "end": 2, "replica": "b", "cached_tokens": 4, "batch_size": 8},
            **{"waited_s": 0.0, "took_s": 2.0, "began_at": 1764200004.0},
        },
    ],
    "steps": [{"turn": 0, "began_at": 1764200002.0, "took_s": 0.002}],
    "retries": [{"at": 1764200003.0, "kind": "generation", "message": DIED}],
    "retries_used": 1,
    "mismatch": {
        **{"tokens": 4, "mean_ratio": 1.25, "share_beyond": 0.25, "largest_ratio": 3.5},
        **{"logprobs": [-1.0] * 4, "reported_at": 1764200020.0},
    },
}


class RecordServer:
    """Has the record of `ID` alone."""

    url = ""

    def __init__(self) -> None:
        self.app = FastAPI()

        @self.app.get("/rollouts/{rollout_id:path}")
        async def record(rollout_id: str) -> Response:
            unknown = {"type": "about:blank", "title": "Unknown", "status": 404, "detail": "There is no record."}
            return JSONResponse(RECORD) if rollout_id == ID else problem(unknown)


@pytest.fixture
def server() -> Iterator[RecordServer]:
    serving = RecordServer()
    with served(serving.app) as serving.url:
        yield serving


def test_story_shows_when_and_where_each_turn_was_made(server: RecordServer) -> None:
    done = rollout(server, "story", ID, columns=200)
    assert done.exit_code == 0, done.stderr
    facts = {row[0]: row[1] for row in rows_of(done.stdout) if len(row) == 2}
    assert facts["took"] == "10.00 s"
    assert (facts["in the queue"], facts["in engines"], facts["in steps"]) == ("250 ms", "3.50 s", "2 ms")
    assert facts["trainer"] == "mean ratio 1.250, 25.0% beyond 10, largest 3.500, of 4 tokens"
    assert [row for row in rows_of(done.stdout) if len(row) == 11] == [
        ["1", "generation", "0 ms", "250 ms", "1.50 s", "2", "a", "0", "", "6, 7", ""],
        ["1", "step", "2.00 s", "", "2 ms", "", "", "", "", "", ""],
        ["", "retry", "3.00 s", "", "", "", "", "", "", "", f"generation: {DIED}"],
        ["2", "generation", "4.00 s", "0 ms", "2.00 s", "2", "b", "4", "8", "", ""],
    ]


def test_story_is_the_record_with_json_and_one_sentence_where_there_is_none(server: RecordServer) -> None:
    document = json.loads(rollout(server, "story", ID, "--json").stdout)
    assert RolloutRecord.model_validate(document) == RolloutRecord.model_validate(RECORD)
    done = rollout(server, "story", "nobody")
    assert (done.exit_code, done.stderr.count("\n"), "There is no record." in done.stderr) == (1, 1, True)


def test_view_names_each_rollout_by_the_id_that_story_takes(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    RolloutResponse.model_validate({**SUMMARY, "samples": [result(rollout_id=ID), result(1)]}).save(file)
    shown = CliRunner().invoke(app, ["view", str(file)], env={"COLUMNS": "80"}).stdout
    assert [line.split()[1:3] for line in shown.splitlines() if line.startswith("│ rollout ")] == [["rollout", ID]]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0004, "0.4 ms"), (0.25, "250 ms"), (1.5, "1.50 s"), (4000, "4,000.00 s")]
)
def test_durations_are_in_milliseconds_below_a_second(seconds: float, text: str) -> None:
    assert duration(seconds) == text

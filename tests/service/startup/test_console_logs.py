"""Which lines of the replicas' logs reach the console, and how they look there."""

import io
import json
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from rich.console import Console

from deployments.logs import STAGES_LOGGER, _json_lines_handler, _JsonLinesFormatter, _LoggedStream, logged_stage
from service.startup.console_logs import _ReplicaLogs, replica_logs_shown, stages_shown

WARNING = {
    "level": "WARNING",
    "logger": "rollout_service.environments",
    "message": "The step failed.",
    "deployment": "math",
    "request_id": "r1",
    "rollout_id": "r1-0-1",
    "exception": "Traceback (most recent call last):\nValueError: x",
}
PRINTED = {"level": "INFO", "logger": "stdout", "message": "[bold] move 3", "deployment": "sliding_puzzle"}


def write(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_warnings_and_printed_lines_are_shown_with_their_deployment(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", WARNING, {**WARNING, "level": "INFO"}, {**WARNING, "level": "DEBUG"})
    write(tmp_path / "b.jsonl", PRINTED, {**PRINTED, "logger": "stderr"})
    write(tmp_path / "c.jsonl", {**PRINTED, "logger": STAGES_LOGGER, "message": "The engine is warm: 2.0 s"})
    assert list(_ReplicaLogs(tmp_path).new_texts()) == [
        "[math] warning: The step failed. (rollout_id r1-0-1)\nTraceback (most recent call last):\nValueError: x",
        "[sliding_puzzle] [bold] move 3",
        "[sliding_puzzle] [bold] move 3",
        "[sliding_puzzle] The engine is warm: 2.0 s",
    ]


def test_a_stage_is_logged_with_its_seconds_unless_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, STAGES_LOGGER)
    with pytest.raises(ValueError, match="broken"), logged_stage("The engine is warm"):
        raise ValueError("broken")
    assert caplog.messages == []
    with logged_stage("The engine is warm"):
        time.sleep(0.1)
    assert re.fullmatch(r"The engine is warm: \d+\.\d s", caplog.messages[0])
    assert float(caplog.messages[0].split()[-2]) >= 0.1


def test_each_line_is_shown_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    logs = _ReplicaLogs(tmp_path)
    assert list(logs.new_texts()) == []
    path = tmp_path / "a.jsonl"
    whole = json.dumps(PRINTED) + "\n"
    path.write_text(whole + whole[:20])
    assert list(logs.new_texts()) == ["[sliding_puzzle] [bold] move 3"]
    path.write_text(whole + whole)
    assert list(logs.new_texts()) == ["[sliding_puzzle] [bold] move 3"]
    assert list(logs.new_texts()) == []


def test_a_log_that_goes_on_in_a_new_file_loses_nothing(tmp_path: Path) -> None:
    logs = _ReplicaLogs(tmp_path)
    path = tmp_path / "a.jsonl"
    write(path, {**PRINTED, "message": "1"})
    assert list(logs.new_texts()) == ["[sliding_puzzle] 1"]
    write(path, {**PRINTED, "message": "2"})
    path.rename(tmp_path / "a.jsonl.1")
    write(path, {**PRINTED, "message": "3"})
    assert list(logs.new_texts()) == ["[sliding_puzzle] 2", "[sliding_puzzle] 3"]


def test_a_flood_of_one_replica_is_cut_and_the_file_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *({**PRINTED, "message": str(number)} for number in range(60)))
    texts = list(_ReplicaLogs(tmp_path).new_texts())
    assert texts[:50] == [f"[sliding_puzzle] {number}" for number in range(50)]
    assert texts[50:] == [f"10 more lines are in {tmp_path / 'a.jsonl'}"]


def test_progress_bars_of_datasets_stay_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.Logger("stderr")
    log.addHandler(handler := _json_lines_handler(tmp_path / "a.jsonl"))
    handler.setFormatter(_JsonLinesFormatter("math", "r"))
    monkeypatch.setattr(sys, "stderr", _LoggedStream(log, sys.stderr))
    datasets.Dataset.from_dict({"a": [1, 2]}).map(lambda row: row, load_from_cache_file=False)
    sys.stderr.write("prepared\n")
    assert "examples/s" in (tmp_path / "a.jsonl").read_text()
    assert list(_ReplicaLogs(tmp_path).new_texts()) == ["[math] prepared"]


def stages_of(console: Console) -> None:
    with stages_shown(console) as show:
        for stage in ("Starting Ray", "Starting [math]", "Starting [math]", "Starting Ingress"):
            show(stage)


def test_where_nothing_is_drawn_anew_each_stage_is_a_line() -> None:
    written = io.StringIO()
    stages_of(Console(file=written, width=20))
    assert written.getvalue().splitlines() == ["Starting Ray", "Starting [math]", "Starting Ingress"]


def test_what_was_written_last_is_shown_before_the_block_is_left(tmp_path: Path) -> None:
    written = io.StringIO()
    with replica_logs_shown(Console(file=written, width=20), tmp_path):
        write(tmp_path / "a.jsonl", {**PRINTED, "message": "longer than the console is wide, with [markup]"})
    assert written.getvalue() == "[sliding_puzzle] longer than the console is wide, with [markup]\n"

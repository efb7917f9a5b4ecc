"""What a replica writes to its log."""

import io
import json
import logging
import weakref
from collections.abc import Iterator
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from deployments import logs
from deployments.logs import _json_lines_handler, _JsonLinesFormatter, _LoggedStream
from deployments.upstream.ray_serve.serve_internals import keep_serve_log_open

LOGGED_AT = 1_800_000_000.25


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[logging.Logger]:
    handler = _json_lines_handler(tmp_path / "replica.jsonl")
    handler.setFormatter(_JsonLinesFormatter("math", "abc123"))
    logger = logging.getLogger("rollout_service.environments")
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)
    handler.close()


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "replica.jsonl").read_text().splitlines()]


def record(message: str, **extra: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "rollout_service.rollouts", "levelname": "WARNING", "msg": message, **extra})
    made.created = LOGGED_AT
    return made


def test_every_context_field_is_written_and_other_extras_are_not() -> None:
    context = {name: f"the {name}" for name in logs.CONTEXT_FIELDS}
    text = _JsonLinesFormatter("Ingress", "abc123").format(record("Lost.", **context, password="secret"))
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2027-01-15T08:00:00.250000+00:00",
        "level": "WARNING",
        "logger": "rollout_service.rollouts",
        "message": "Lost.",
        "deployment": "Ingress",
        **context,
    }


def test_a_traceback_is_text_on_the_same_line(logger: logging.Logger, tmp_path: Path) -> None:
    try:
        raise ValueError("no number:\nü")
    except ValueError as error:
        raised = error
    logger.warning("The step failed.", exc_info=raised, extra={"rollout_id": "r1-0-1"})
    [line] = lines_in(tmp_path)
    assert line["message"] == "The step failed."
    assert line["rollout_id"] == "r1-0-1"
    first, *_, last_but_one, last = line["exception"].splitlines()
    assert (first, last_but_one, last) == ("Traceback (most recent call last):", "ValueError: no number:", "ü")


def test_what_json_cannot_hold_is_written_as_text(logger: logging.Logger, tmp_path: Path) -> None:
    # pytest would keep the line for its report, in which half a character cannot stand.
    logger.propagate = False
    logger.warning("half a character: \ud800", extra={"sample": tmp_path})
    logger.propagate = True
    [line] = lines_in(tmp_path)
    assert line["sample"] == str(tmp_path)
    assert line["message"] == "half a character: \ud800"


def test_outside_a_replica_the_logs_of_the_process_stay_as_they_are() -> None:
    root = logging.getLogger()
    handlers = list(root.handlers)
    logs.configure()
    assert root.handlers == handlers


@pytest.fixture
def stream(logger: logging.Logger) -> _LoggedStream:
    logger.setLevel(logging.INFO)
    return _LoggedStream(logger, io.StringIO())


def test_each_printed_line_is_a_line_of_the_log_and_a_flush_ends_one(stream: _LoggedStream, tmp_path: Path) -> None:
    print("one\n100%s", file=stream)
    print("thr", end="", file=stream)
    print("ee  \n", file=stream)
    print("half", end="", file=stream, flush=True)
    print("rest", file=stream)
    assert [line["message"] for line in lines_in(tmp_path)] == ["one", "100%s", "three", "half", "rest"]
    assert {line["level"] for line in lines_in(tmp_path)} == {"INFO"}


def test_a_log_that_cannot_be_written_is_reported_on_the_original_stream() -> None:
    original = io.StringIO()
    logger = logging.getLogger("broken")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    stream = _LoggedStream(logger, original)

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stream.write(f"cannot write {record.getMessage()!r}\n")

    logger.handlers = [Broken()]
    print("a line", file=stream)
    assert original.getvalue() == "cannot write 'a line'\n"


def test_serves_buffer_keeps_its_file_when_a_library_closes_all_handlers(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    file = RotatingFileHandler(path)
    buffer = MemoryHandler(capacity=1000, target=file)
    serves_logger = logging.Logger("serve")
    serves_logger.addHandler(buffer)
    keep_serve_log_open(serves_logger)
    serves_logger.warning("before")
    # As `logging.config.dictConfig` does.
    logging.shutdown([weakref.ref(file), weakref.ref(buffer)])
    assert buffer.target is file
    serves_logger.warning("after")
    buffer.flush()
    assert path.read_text() == "before\nafter\n"
    file.close()

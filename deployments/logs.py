"""Logs of a replica: one JSON object a line, in a file of its own beside Ray Serve's logs.

A line holds `time` (ISO 8601, UTC), `level`, `logger`, `message`, `deployment` and `replica_id`; where they are known
also the fields of `CONTEXT_FIELDS`, and `exception`, a traceback as text.
"""

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.upstream.ray_serve.serve_internals import keep_serve_log_open, use_own_print

CONTEXT_FIELDS = (
    "request_id",
    "rollout_id",
    "task_name",
    "sample",
    "generation_index",
    "generation_id",
    "replica_id",
    "version",
    "cause",
)
"""Fields that a caller may give as `extra`. A `replica_id` given is that of the replica that the line is about."""
MAX_FILE_BYTES = 64 * 2**20
OLD_FILES = 4
OUTPUT_LOGGERS = ("stdout", "stderr")
"""Lines that a replica printed, by the stream that they were printed to."""
STAGES_LOGGER = "rollout_service.stages"
"""Lines of stages that have ended, which whoever waits for a start sees."""


def configure(*, capture_output: bool = True) -> None:
    """Sets up the logs of the replica that calls it; does nothing outside a replica, where logging is the caller's.

    Args:
        capture_output: whether what the process prints is logged too. Otherwise it goes to Ray Serve's log, which with
            `serve.env` is written only when a thousand lines are together.
    """
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return
    replica_id = context.replica_id.unique_id
    folder = serve_logs_folder()
    folder.mkdir(parents=True, exist_ok=True)
    handler = _json_lines_handler(folder / f"{context.app_name}_{context.deployment}_{replica_id}.jsonl")
    handler.setFormatter(_JsonLinesFormatter(context.deployment, replica_id))
    logging.getLogger().addHandler(handler)
    logging.getLogger("rollout_service").setLevel(logging.INFO)
    keep_serve_log_open()
    if capture_output:
        _log_output(handler)


@contextmanager
def logged_stage(name: str) -> Iterator[None]:
    """Logs how long a stage of a start took, unless it fails."""
    began = time.monotonic()
    yield
    logging.getLogger(STAGES_LOGGER).info("%s: %.1f s", name, time.monotonic() - began)


def serve_logs_folder() -> Path:
    """Where Ray Serve and the replicas of this machine write their logs."""
    return session_folder() / "logs" / "serve"


def session_folder() -> Path:
    """Ray's folder of this cluster on this machine: logs, sockets."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name()


def _log_output(handler: logging.Handler) -> None:
    """Makes each line that this process prints a line of the log; writes to the file descriptors stay as they are."""
    use_own_print()
    for name in OUTPUT_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [handler]
    sys.stdout = _LoggedStream(logging.getLogger("stdout"), sys.stdout)
    sys.stderr = _LoggedStream(logging.getLogger("stderr"), sys.stderr)


class _JsonLinesFormatter(logging.Formatter):
    """Formats a record as one JSON object without line breaks."""

    def __init__(self, deployment: str, replica_id: str) -> None:
        super().__init__()
        self._deployment = deployment
        self._replica_id = replica_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "deployment": self._deployment,
            "replica_id": self._replica_id,
        }
        known = ((name, getattr(record, name, None)) for name in CONTEXT_FIELDS)
        line.update({name: value for name, value in known if value is not None})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _json_lines_handler(path: Path) -> RotatingFileHandler:
    """Appends to a file in UTF-8, and writes each line at once."""
    return RotatingFileHandler(
        path, maxBytes=MAX_FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8", errors="backslashreplace"
    )


class _LoggedStream(io.TextIOBase):
    """A text stream whose lines go to a logger; everything else is asked of the stream that it stands for."""

    def __init__(self, logger: logging.Logger, original: TextIO) -> None:
        self._logger = logger
        self._original = original
        self._of_thread = threading.local()
        """`line`: what the thread has written without a line break. `logs`: whether it is inside the logger now."""

    def write(self, text: str) -> int:
        # logging reports its own failures, such as a full disk, on stderr: they must not come back here.
        if getattr(self._of_thread, "logs", False):
            return self._original.write(text)
        *lines, self._of_thread.line = (getattr(self._of_thread, "line", "") + text).split("\n")
        self._log(lines)
        return len(text)

    def flush(self) -> None:
        line, self._of_thread.line = getattr(self._of_thread, "line", ""), ""
        self._log([line])

    def _log(self, lines: list[str]) -> None:
        self._of_thread.logs = True
        try:
            for line in lines:
                if line.strip():
                    self._logger.info("%s", line.rstrip())
        finally:
            self._of_thread.logs = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only in `io` too
        return self._original.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

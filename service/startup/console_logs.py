"""Shows on the console what is being done, and what the replicas of this machine print and warn of.

The rest stays in their logs.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from deployments.logs import OUTPUT_LOGGERS, STAGES_LOGGER
from service.startup.processes import repeated

_POLL_S = 0.5
_MOST_RECORDS_AT_ONCE = 50
"""Most records of one replica per read of its log: a failure of every rollout must not drown the rest."""


@contextmanager
def stages_shown(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields what shows a stage of the work, each time that it is called, with the seconds since the block began.

    On a terminal that is one line, drawn anew. Elsewhere, as in a file, it is a line for each stage.
    """
    began = time.monotonic()
    with console.status("") if console.is_terminal else nullcontext() as status:
        shown = ""

        def show(stage: str) -> None:
            nonlocal shown
            seconds = round(time.monotonic() - began)
            text = f"{stage} ({seconds} s)" if seconds else stage
            if status is not None:
                status.update(escape(text))
            elif stage != shown:
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            shown = stage

        yield show


@contextmanager
def replica_logs_shown(console: Console, folder: Path) -> Iterator[None]:
    """Follows the logs in `folder` for the length of the block, and shows what remains when it is left."""
    logs = _ReplicaLogs(folder)

    def show() -> None:
        for text in logs.new_texts():
            # What the console cannot encode must not end the thread that shows everything else.
            text = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        with repeated(show, _POLL_S, "replica-logs"):
            yield
    finally:
        show()


class _ReplicaLogs:
    """Records for the console in the log files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[int, int] = {}
        """By inode, the end of the last line that was read: a log that has grown too long gets another name."""

    def new_texts(self) -> Iterator[str]:
        """Yields one text for each record that was written since the last call and that the user should see."""
        for path in [*sorted(self._folder.glob("*.jsonl.*")), *sorted(self._folder.glob("*.jsonl"))]:
            texts = [text for line in self._new_lines(path) if (text := _text_for_the_console(json.loads(line)))]
            yield from texts[:_MOST_RECORDS_AT_ONCE]
            if (unseen := len(texts) - _MOST_RECORDS_AT_ONCE) > 0:
                yield f"{unseen} more lines are in {path}"

    def _new_lines(self, path: Path) -> list[bytes]:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return []  # It has just got another name.
        with file:
            stat = os.fstat(file.fileno())
            begin = self._read_bytes.get(stat.st_ino, 0)
            if begin > stat.st_size:
                begin = 0  # A new file has the inode of one that was removed.
            file.seek(begin)
            # A line that is being written is left for the next time.
            text, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes[stat.st_ino] = begin + len(text) + len(newline)
        return text.splitlines()


def _text_for_the_console(record: dict[str, Any]) -> str | None:
    """A printed line, a stage that has ended, or a warning or an error with its traceback; None for everything else."""
    name = f"[{record['deployment']}]"
    if record["logger"] in OUTPUT_LOGGERS:
        # A progress bar writes over itself.
        return None if record["message"].startswith("\r") else f"{name} {record['message']}"
    if record["logger"] == STAGES_LOGGER:
        return f"{name} {record['message']}"
    if logging.getLevelNamesMapping().get(record["level"], logging.ERROR) < logging.WARNING:
        return None
    about = next((f" ({field} {record[field]})" for field in ("rollout_id", "request_id") if field in record), "")
    sentence = f"{name} {record['level'].lower()}: {record['message']}{about}"
    return "\n".join([sentence, record["exception"]] if "exception" in record else [sentence])

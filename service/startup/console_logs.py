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
from typing import Any, BinaryIO

from rich.console import Console
from rich.markup import escape

from deployments.logs import OUTPUT_LOGGERS
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
    logs = ReplicaLogs(folder)

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


class ReplicaLogs:
    """Records for the console in the log files of a folder, from the moment that each is first seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files: dict[Path, BinaryIO] = {}

    def new_texts(self) -> Iterator[str]:
        """Yields one text for each record that was written since the last call and that the user should see."""
        for path in sorted(self._folder.glob("*.jsonl")):
            texts = [text for line in self._new_lines(path) if (text := text_for_the_console(json.loads(line)))]
            yield from texts[:_MOST_RECORDS_AT_ONCE]
            if (unseen := len(texts) - _MOST_RECORDS_AT_ONCE) > 0:
                yield f"{unseen} more lines are in {path}"

    def _new_lines(self, path: Path) -> Iterator[bytes]:
        file = self._open_files.get(path)
        if file is None:
            file = self._open_files[path] = path.open("rb")
        yield from _complete_lines(file)
        # A log that has grown too long goes on in a new file under the same name, which may be about to be made.
        if not path.exists():
            return
        if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
            file.close()
            self._open_files[path] = path.open("rb")
            yield from _complete_lines(self._open_files[path])


def _complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Reads to the end of the file, and leaves a line that is being written for the next time."""
    while (line := file.readline()).endswith(b"\n"):
        yield line
    file.seek(-len(line), 1)


def text_for_the_console(record: dict[str, Any]) -> str | None:
    """A printed line, or a warning or an error with its traceback; None for everything else."""
    name = f"[{record['deployment']}]"
    if record["logger"] in OUTPUT_LOGGERS:
        # A progress bar writes over itself.
        return None if record["message"].startswith("\r") else f"{name} {record['message']}"
    if logging.getLevelNamesMapping().get(record["level"], logging.ERROR) < logging.WARNING:
        return None
    about = next((f" ({field} {record[field]})" for field in ("rollout_id", "request_id") if field in record), "")
    sentence = f"{name} {record['level'].lower()}: {record['message']}{about}"
    return "\n".join([sentence, record["exception"]] if "exception" in record else [sentence])

"""An evaluation as the results of another evaluator, for its own viewers and readers: `EvaluationFile`.

| format | what is written | read by |
| --- | --- | --- |
| `harbor` | the folder of a job, with a folder for each trial | `harbor view`, `JobResult`, `TrialResult` |
| `inspect` | a log, `.json` or `.eval` | `inspect view`, `inspect_ai.log.read_eval_log` |

Neither package is needed.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal
from zipfile import BadZipFile

from rollout_client.data_out import harbor_job, inspect_log
from rollout_client.data_out.evaluation import Evaluation

EvaluationFormat = Literal["harbor", "inspect"]
WRITERS: Mapping[EvaluationFormat, ModuleType] = {"harbor": harbor_job, "inspect": inspect_log}


class EvaluationFile:
    """Where the results of an evaluation are written.

    Args:
        path: a folder that is made, for `harbor`; a file that ends in `.json` or `.eval`, for `inspect`.
        overwrite: results of an earlier evaluation are replaced, and not only those of one that did not end.

    Raises:
        ValueError: the name does not fit the format, or something that stays is there.
    """

    def __init__(self, path: Path, format: EvaluationFormat, overwrite: bool = False) -> None:
        self.path = path
        self._format = format
        self._writer = WRITERS[format]
        self._writer.check_name(path)
        if not path.resolve().parent.is_dir():
            raise ValueError(f"--results {path}: there is no folder {path.resolve().parent}; make it first.")
        if path.exists():
            self._check_replaced(overwrite)

    def _check_replaced(self, overwrite: bool) -> None:
        try:
            status = self._writer.status_at(self.path)
        except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
            raise ValueError(
                f"--results {self.path} exists, and rollout eval did not write it in the format {self._format}: name "
                "another path."
            ) from error
        if status == "success" and not overwrite:
            raise ValueError(
                f"--results {self.path} has the results of an evaluation: name another path, or replace them with "
                "--overwrite."
            )

    def check(self, tasks: Sequence[str]) -> None:
        """Raises `ValueError` where the format has no place for the tasks together."""
        self._writer.check_tasks(tasks)

    def write(self, evaluation: Evaluation) -> None:
        """Writes beside the path, then takes the place of what is there. Raises `OSError`."""
        written = self.path.with_name(f"{self.path.name}.new")
        remove(written)
        self._writer.write(evaluation, written, self.path.resolve())
        if self.path.is_dir():
            remove(self.path)
        written.replace(self.path)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

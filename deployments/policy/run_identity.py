"""Which model and which training run the store's folder belongs to: no run serves the weights of another by accident.

    run.json    in the policy store's folder

Guarantee: a folder with versions of another model or another run is refused, with a sentence that says what to do.
"""

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel

from deployments.policy.durable_files import Trash, write_durably
from deployments.policy.versions import INDEX, initial_file, read_index


class FolderRefused(Exception):
    """The folder holds versions of another model or run, or cannot be written; the message says what to do."""


class _RunRecord(BaseModel):
    """The content of `run.json`."""

    run: str
    model: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The model and the run that the config names.

    Args:
        run: name of the training run, if it has one.
        model: folder or hub name of the checkpoint that engines start with.
        revision: of a model of the hub.
    """

    run: str | None
    model: str
    revision: str | None = None

    def claim(self, folder: Path) -> None:
        """Records in the folder that it belongs to the run from now on, by its own name or one that is drawn.

        A folder without versions is taken over.

        Raises:
            FolderRefused: it holds versions of another model or run, or cannot be written.
        """
        recorded = _recorded_in(folder)
        difference = None if recorded is None else self._difference_from(recorded)
        if difference is not None and _is_used(folder):
            raise FolderRefused(f"policy.folder: {folder} {difference}")
        if recorded is not None and difference is None:
            return
        record = _RunRecord(run=self.run or f"run-{uuid4().hex[:12]}", model=self.model, revision=self.revision)
        try:
            Trash(folder).discard(initial_file(folder))
            write_durably(folder / "run.json", record.model_dump_json())
        except OSError as error:
            raise FolderRefused(f"policy.folder: {folder} cannot be written: {error}") from error

    def _difference_from(self, recorded: _RunRecord) -> str | None:
        if self.run is not None:
            if self.run == recorded.run:
                return None
            return (
                f"holds the versions of the run {recorded.run}, and policy.run is {self.run}: name another folder, or "
                f"set policy.run to {recorded.run} to go on with its weights."
            )
        if (self.model, self.revision) == (recorded.model, recorded.revision):
            return None
        return (
            f"holds versions of the model {_label(recorded.model, recorded.revision)}, and the service's model is "
            f"{_label(self.model, self.revision)}: name another folder, or set policy.run to {recorded.run} to go on "
            "with its weights if it is the same model in another place."
        )


def _recorded_in(folder: Path) -> _RunRecord | None:
    try:
        return _RunRecord.model_validate_json((folder / "run.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _label(model: str, revision: str | None) -> str:
    return model if revision is None else f"{model} at {revision}"


def _is_used(folder: Path) -> bool:
    """Whether a store's folder has, or had, any version but the initial one, of whatever policy."""
    index = read_index(folder)
    return bool(index.current or index.versions or any(folder.glob(f"names/*/{INDEX}")))

"""From a row to a sample: which column becomes which field. No I/O."""

import re
from typing import Any

from pydantic_core import from_json

from deployments.data.rows import Row
from deployments.data.settings import PROMPT_PLACE, ColumnSettings, DataSettings
from rollout_client.contract import SampleInput

SAMPLE_FIELDS = [name for name in SampleInput.model_fields if name != "task_name"]
MISSING = object()


class SampleColumns:
    """Makes samples of the rows of one data set."""

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        given = settings.columns or {name: name for name in SAMPLE_FIELDS} | {"prompt": "prompt"}
        self._sources = {
            target: ColumnSettings(column=source) if isinstance(source, str) else source
            for target, source in given.items()
        }

    @property
    def fingerprint(self) -> bytes:
        """Equal for columns that make equal samples of equal rows."""
        return self._settings.model_dump_json(include={"columns", "system_prompt", "prompt_template"}).encode()

    @property
    def named(self) -> list[tuple[str, str]]:
        """The fields and columns that the config names."""
        return [(target, self._sources[target].column) for target in self._settings.columns]

    def sample(self, row: Row) -> Row:
        """The fields of the sample, without its task. Columns that the row does not have are left out.

        Raises:
            ValueError: what is wrong with the row.
        """
        sample: Row = {}
        for target, source in self._sources.items():
            if (value := value_at(row, source.column)) is MISSING:
                continue
            first, _, rest = ("messages" if target == "prompt" else target).partition(".")
            if rest:
                put(sample.setdefault(first, {}), rest.split("."), read(source, value))
            else:
                sample[first] = read(source, value)
        if "messages" in sample:
            sample["messages"] = self._messages(sample["messages"])
        return sample

    def _messages(self, prompt: Any) -> Any:
        """The messages of a prompt that is a text or a list of them; anything else is left for validation to refuse."""
        if isinstance(prompt, str):
            template = self._settings.prompt_template or PROMPT_PLACE
            prompt = [{"role": "user", "content": template.replace(PROMPT_PLACE, prompt)}]
        if self._settings.system_prompt is not None and isinstance(prompt, list):
            return [{"role": "system", "content": self._settings.system_prompt}, *prompt]
        return prompt


def value_at(row: Row, path: str) -> Any:
    """The value of a column, or of a field inside one; `MISSING` if there is none."""
    if path in row:
        return row[path]
    first, _, rest = path.partition(".")
    inner = row.get(first)
    return value_at(inner, rest) if rest and isinstance(inner, dict) else MISSING


def put(fields: Row, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        fields = fields.setdefault(name, {})
    fields[path[-1]] = value


def read(source: ColumnSettings, value: Any) -> Any:
    """Raises `ValueError` if the value is not as the config says."""
    if source.pattern is not None:
        found = re.search(source.pattern, text_of(source, value))
        if found is None:
            raise ValueError(f"the pattern {source.pattern!r} is not found in column {source.column!r}")
        value = found[1] if found.re.groups else found[0]
    if source.parse_json:
        try:
            return from_json(text_of(source, value))
        except ValueError as error:
            raise ValueError(f"column {source.column!r} is no JSON: {error}") from error
    return value


def text_of(source: ColumnSettings, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"column {source.column!r} is no text: {value!r:.80}")
    return value

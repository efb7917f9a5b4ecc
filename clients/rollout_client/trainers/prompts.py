"""From the rows of a trainer's dataset to samples of the service. Needs nothing heavy."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_client.contract import JsonObject

Prompt = Sequence[Mapping[str, Any]] | str
OTHER_COLUMNS = ("id", "stop_strings", "tools", "chat_template_kwargs", "observation_format")
"""Columns that a sample has by the same name."""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Makes of a row what a sample has beside its prompt."""

    task_name: str | None = None
    """Of rows without a column `task_name`."""
    env_columns: Sequence[str] = ()
    """The columns that make up the `extra_env_info` of rows without a column of that name."""

    def fields(self, row: Mapping[str, Any]) -> JsonObject:
        """Raises `ValueError` if the row says no task, or lacks one of `env_columns`."""
        task_name = row.get("task_name") or self.task_name
        if task_name is None:
            raise ValueError("A row of the dataset has no column task_name: add one, or give the adapter a task_name.")
        others = {name: row[name] for name in OTHER_COLUMNS if row.get(name) is not None}
        return {"task_name": task_name, "extra_env_info": self.extra_env_info(row), **others}

    def extra_env_info(self, row: Mapping[str, Any]) -> JsonObject:
        """A column of text is read as JSON, which keeps rows of several tasks from filling up each other's fields."""
        if (found := row.get("extra_env_info")) is not None:
            info: JsonObject = json.loads(found) if isinstance(found, str) else dict(found)
            return info
        if missing := [name for name in self.env_columns if name not in row]:
            raise ValueError(f"A row of the dataset has no column {missing[0]}; it has {', '.join(row)}.")
        return {name: row[name] for name in self.env_columns}


def messages_of(prompt: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """The messages without fields that are null, with which a dataset fills up what other rows have."""
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]


def prompt_key(prompt: Prompt) -> str:
    """Equal for equal prompts."""
    return json.dumps(prompt if isinstance(prompt, str) else messages_of(prompt), sort_keys=True, default=str)


def fields_by_prompt(dataset: Iterable[Mapping[str, Any]], reader: RowReader) -> dict[str, JsonObject]:
    """What belongs to each prompt of the dataset, by `prompt_key`.

    Raises `ValueError` if one prompt stands in two rows that differ in anything else.
    """
    found: dict[str, JsonObject] = {}
    for row in dataset:
        fields = reader.fields(row)
        if found.setdefault(key := prompt_key(row["prompt"]), fields) != fields:
            raise ValueError(
                f"Two rows of the dataset have the same prompt and differ otherwise, so that which is meant cannot be "
                f"told from the prompt: {key[:200]}. Make the prompts differ, or give the adapter fields_of."
            )
    return found

"""Shared by the adapters of trainers: rows of a dataset as fields of a sample, and options. Needs only pydantic."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from rollout_client.calls.json_values import json_value
from rollout_client.contract.messages import JsonObject
from rollout_client.contract.rollouts import ObservationFormat, Sampling

Prompt = Sequence[Mapping[str, Any]] | str
"""Chat messages, or plain text."""
IMAGE_PARTS = ("image", "image_url")
SAMPLE_COLUMNS = ("id", "stop_strings", "tools", "chat_template_kwargs", "observation_format")
"""Columns of a row that become the sample's fields of the same name."""


class GenerationOptions(TypedDict, total=False):
    """Fields of the request that no trainer's arguments set; as in `RolloutOptions`."""

    sampling: Sampling | Mapping[str, Any] | None
    """Each field that is set here replaces the one of the trainer's arguments."""
    observation_format: ObservationFormat | None
    chat_template_kwargs: Mapping[str, Any] | None
    deadline_s: float | None
    sample_retries: int | None


def sampling_fields(options: GenerationOptions) -> dict[str, Any]:
    """The fields of `sampling` that are set."""
    given = options.get("sampling") or {}
    return given.model_dump(exclude_unset=True) if isinstance(given, Sampling) else dict(given)


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads from a row all fields of a sample except its prompt."""

    task_name: str | None = None
    """The task of rows without a column `task_name`."""
    env_columns: Sequence[str] = ()
    """The columns that become `extra_env_info` in rows without a column of that name."""

    def fields(self, row: Mapping[str, Any]) -> JsonObject:
        """Raises `ValueError` if the row has no task, or lacks one of `env_columns`."""
        task_name = row.get("task_name") or self.task_name
        if task_name is None:
            raise ValueError("A row of the dataset has no column task_name: add one, or give the adapter a task_name.")
        others = {name: row[name] for name in SAMPLE_COLUMNS if row.get(name) is not None}
        return {"task_name": task_name, "extra_env_info": self.extra_env_info(row), **others}

    def extra_env_info(self, row: Mapping[str, Any]) -> JsonObject:
        """A text column is parsed as JSON.

        Datasets give all rows of a struct column the same fields, missing ones as null; JSON text keeps the fields of
        different tasks apart.
        """
        if (found := row.get("extra_env_info")) is not None:
            return cast(JsonObject, json.loads(found)) if isinstance(found, str) else dict(found)
        if missing := [name for name in self.env_columns if name not in row]:
            raise ValueError(f"A row of the dataset has no column {missing[0]}; it has {', '.join(row)}.")
        return {name: row[name] for name in self.env_columns}


def messages_of(prompt: Prompt) -> list[JsonObject]:
    """Messages of a prompt, without null fields, which a dataset adds where another row has such a field.

    Raises:
        NotJson: a message holds something that JSON does not have.
        ValueError: a message shows an image.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if any(_shows_image(message.get("content")) for message in prompt):
        raise ValueError(
            "A prompt of the dataset shows images, and this adapter trains on tokens alone: leave such rows out, or "
            "train on them with to_tensors and image_inputs."
        )
    messages: list[JsonObject] = json_value(list(prompt), "prompt")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _shows_image(content: object) -> bool:
    parts = content if isinstance(content, Iterable) and not isinstance(content, str) else ()
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in parts)


def prompt_key(prompt: Prompt) -> str:
    """Key that is equal for equal prompts."""
    return json.dumps(prompt if isinstance(prompt, str) else messages_of(prompt), sort_keys=True, default=str)


def fields_by_prompt(dataset: Iterable[Mapping[str, Any]], reader: RowReader) -> dict[str, JsonObject]:
    """The fields of each row of `dataset`, by the `prompt_key` of its prompt.

    Raises:
        NotJson: a row holds something that JSON does not have.
        ValueError: two rows have the same prompt and differ in another field.
    """
    found: dict[str, JsonObject] = {}
    for place, row in enumerate(dataset):
        fields = json_value(reader.fields(row), f"dataset[{place}]")
        if found.setdefault(key := prompt_key(row["prompt"]), fields) != fields:
            raise ValueError(
                "Two rows of the dataset have the same prompt and differ in other fields, so the prompt does not tell "
                f"which row is meant: {key[:200]}. Make the prompts differ, or give the adapter fields_of."
            )
    return found

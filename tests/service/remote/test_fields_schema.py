"""Which samples the schema of a task's fields vouches for, and about which the environment must be asked."""

from typing import Any

import pytest
from pydantic import BaseModel

from deployments.environments.math import MathInfo
from deployments.protocols.environments import TaskDescription
from service.remote.environment import FieldsSchema


class NoFields(BaseModel):
    pass


def schema_of(model: type[BaseModel]) -> FieldsSchema:
    return FieldsSchema.of(TaskDescription("task", "A task.", fields=model.model_json_schema()))


def test_the_environment_need_not_be_asked_about_samples_that_the_schema_accepts() -> None:
    samples: list[dict[str, Any]] = [{"ground_truth": "4"}, {}, {"ground_truth": 4, "more": 1}, {"ground_truth": None}]
    assert schema_of(MathInfo).doubtful(samples) == [1, 3]


@pytest.mark.parametrize("fields", [NoFields.model_json_schema(), {}])
def test_an_environment_without_fields_accepts_anything(fields: dict[str, Any]) -> None:
    assert FieldsSchema.of(TaskDescription("task", "A task.", fields)).doubtful([{}, {"anything": [1]}]) == []


def test_an_environment_with_validators_of_its_own_is_asked_about_every_sample() -> None:
    description = TaskDescription("task", "A task.", MathInfo.model_json_schema(), has_validators=True)
    assert FieldsSchema.of(description).doubtful([{"ground_truth": "4"}] * 3) == [0, 1, 2]


@pytest.mark.parametrize("fields", [{"type": "nonsense"}, {"$ref": "http://example.com/schema"}, {"$ref": "#/nowhere"}])
def test_an_environment_whose_schema_is_not_valid_is_asked_about_every_sample(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert FieldsSchema.of(TaskDescription("task", "A task.", fields)).doubtful([{}]) == [0]
    assert caplog.messages == [
        "The fields of task task are not a valid JSON schema: its samples are checked by the environment alone."
    ]

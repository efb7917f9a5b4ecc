"""Which samples an environment may refuse, by the JSON schema of its fields. No I/O."""

import logging
from collections.abc import Sequence
from typing import Any, Self

import jsonschema_rs

from deployments.protocols.environments import TaskDescription

logger = logging.getLogger("rollout_service.remote")


class FieldsSchema:
    """The schema of one task's `extra_env_info`, as its environment described it.

    The schema alone refuses nothing: it can be older than the environment, and pydantic accepts more than its schema
    says, such as the text "3" for an integer. It only tells which samples the environment need not be asked about.
    """

    def __init__(self, validator: jsonschema_rs.Draft202012Validator | None) -> None:
        """Args: `validator` is None if the environment must be asked about every sample."""
        self._validator = validator

    @classmethod
    def of(cls, description: TaskDescription) -> Self:
        if description.has_validators:
            return cls(None)
        try:
            return cls(jsonschema_rs.Draft202012Validator(description.fields))
        except (jsonschema_rs.ValidationError, ValueError) as error:
            logger.warning(
                "The fields of task %s are no valid JSON schema: its samples are checked by the environment alone.",
                description.task_name,
                exc_info=error,
                extra={"task_name": description.task_name},
            )
            return cls(None)

    def doubtful(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[int]:
        """The places of the samples about which the environment must be asked: they do not match its schema."""
        if self._validator is None:
            return list(range(len(extra_env_infos)))
        is_valid = self._validator.is_valid
        return [place for place, extra_env_info in enumerate(extra_env_infos) if not is_valid(extra_env_info)]

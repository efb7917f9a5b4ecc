"""The two parts of a response of `POST /rollout` in any form: its summary and its rollouts."""

from typing import Protocol, cast

from pydantic import BaseModel

from rollout_client.contract.base import set_fields
from rollout_client.contract.rollouts import RolloutSummary, SampleResult


class AnyResponse(Protocol):
    """A response of `POST /rollout` in any form: a `RolloutSummary` with its rollouts."""

    @property
    def samples(self) -> list[SampleResult]: ...


def parts_of(response: AnyResponse) -> tuple[RolloutSummary, list[SampleResult]]:
    """The summary of the request, with the fields that were set, and its rollouts."""
    fields = {name: value for name, value in set_fields(cast(BaseModel, response)).items() if name != "samples"}
    return RolloutSummary(**fields), response.samples

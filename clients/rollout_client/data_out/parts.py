"""A response in its two parts, whatever it came as."""

from typing import cast

from pydantic import BaseModel

from rollout_client.contract.response_methods import DataOut
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from rollout_client.set_fields import set_fields


def parts_of(response: DataOut) -> tuple[RolloutSummary, list[SampleResult]]:
    """What it says of the request, with the fields that were set, and its rollouts."""
    fields = {name: value for name, value in set_fields(cast(BaseModel, response)).items() if name != "samples"}
    return RolloutSummary(**fields), response.samples

"""Samples that the service takes from a task itself, so that they need not be sent: a part of `POST /rollout`."""

from typing import Annotated

from pydantic import ConfigDict, Field

from rollout_client.contract_models import Strict

MOST_SAMPLES_OF_A_RANGE = 65_536
Place = Annotated[int, Field(ge=0, lt=2**53)]
ShuffleSeed = Annotated[int, Field(ge=0, lt=2**63)]


class SampleRange(Strict):
    """Samples that follow one another in the data of a task, or that its environment makes if it has no data.

    Equal ranges give equal samples.
    """

    task_name: str
    """One of those that `GET /tasks` lists."""
    split: str | None = None
    """A part of the data, such as `validation`; by default the first that `GET /tasks` names."""
    start: Place = 0
    """The place of the first sample. Places count on through all epochs: with 1000 rows, place 1000 is the first of the
    second epoch."""
    count: Annotated[int, Field(ge=1, le=MOST_SAMPLES_OF_A_RANGE)]
    """How many samples."""
    seed: ShuffleSeed | None = None
    """Shuffles every epoch of the data, each in another way; by default as the service's config says. Without data: the
    seed of what the environment makes, by default 0."""


class NextSampleRange(SampleRange):
    """As many samples as a `SampleRange` of the request, from where that one ended."""

    model_config = ConfigDict(extra="allow")

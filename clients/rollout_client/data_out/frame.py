"""Rollouts as a data frame, flat enough for `groupby`. Needs the extra `pandas`."""

from collections.abc import Mapping
from typing import Any

from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.response_parts import AnyResponse
from rollout_client.errors import needed_for
from rollout_client.results import is_clipped, last_finish_reason

with needed_for("A data frame", "pandas"):
    import pandas as pd

FLATTENED = ("rewards", "metrics", "error")
"""Fields that have a column for each of their own fields."""


def data_frame(response: AnyResponse) -> pd.DataFrame:
    return pd.DataFrame([flat_row(sample) for sample in response.samples])


def flat_row(sample: SampleResult) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in sample.model_dump(exclude_unset=True).items():
        if name not in FLATTENED:
            row[name] = value
        elif isinstance(value, Mapping):
            row |= {f"{name}.{part}": held for part, held in value.items()}
    return row | {"metrics.finish_reason": last_finish_reason(sample), "metrics.clipped": is_clipped(sample)}

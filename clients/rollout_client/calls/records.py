"""The calls about rollouts that have ended: the request and the response of each."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict
from urllib.parse import quote

from rollout_client.calls.call import Call, call_for, without_none
from rollout_client.calls.json_values import as_given, json_bytes, json_value
from rollout_client.contract.records import (
    Mismatch,
    RecordedRollout,
    RecordedRollouts,
    ReplayResponse,
    ReportAnswer,
    RolloutRecord,
)
from rollout_client.contract.rollouts import SampleResult


def rollout_record_call(rollout_id: str) -> Call[RolloutRecord]:
    return call_for(RolloutRecord, "GET", f"/rollouts/{quote(rollout_id, safe='')}")


def rollout_records_call(count: int) -> Call[list[RecordedRollout]]:
    return call_for(RecordedRollouts, "GET", "/rollouts", query={"count": count}).picking(
        lambda answer: answer.rollouts
    )


def replay_call(rollout: SampleResult | Mapping[str, Any] | None, rollout_id: str | None) -> Call[ReplayResponse]:
    given = without_none({"rollout": as_given(rollout), "rollout_id": rollout_id})
    return call_for(ReplayResponse, "POST", "/replay", body=json_bytes(given))


def mismatch_call() -> Call[Mismatch]:
    return call_for(Mismatch, "GET", "/mismatch")


class ReportColumns(TypedDict, total=False):
    """The arguments of `report_logprobs` that are of each rollout."""

    rollouts: Iterable[str | SampleResult]
    logprobs: Iterable[Any]
    masks: Iterable[Any] | None
    token_ids: Iterable[Any] | None
    starts: Iterable[int] | None


def report_call(
    rollouts: Iterable[str | SampleResult | None],
    logprobs: Iterable[Any],
    masks: Iterable[Any] | None,
    token_ids: Iterable[Any] | None,
    starts: Iterable[int] | None,
    weight_version: str | None,
) -> Call[ReportAnswer]:
    """Raises `ValueError` unless there is one row of numbers for each rollout, and each has an id."""
    given = [[*map(finite_or_none, row)] for row in rows_of("logprobs", logprobs)]
    columns: dict[str, list[Any]] = {"rollout_id": [*map(id_of, rollouts)], "logprobs": given}
    if masks is not None:
        columns["mask"] = [[bool(value) for value in row] for row in rows_of("masks", masks)]
    if token_ids is not None:
        columns["token_ids"] = rows_of("token_ids", token_ids)
    if starts is not None:
        columns["start"] = [*map(int, starts)]
    count = len(columns["rollout_id"])
    for name, rows in columns.items():
        if len(rows) != count:
            raise ValueError(f"{name} has {len(rows)} rows for {count} rollouts: give one for each")
    if weight_version is not None:
        columns["weight_version"] = [weight_version] * count
    reports = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return call_for(ReportAnswer, "POST", "/rollouts/logprobs", body=json_bytes({"reports": reports}))


def id_of(rollout: str | SampleResult | None) -> str:
    name = rollout.rollout_id if isinstance(rollout, SampleResult) else rollout
    if name is None:
        raise ValueError("a rollout has no rollout_id: the service that has played it is older than this client")
    return name


def rows_of(name: str, rows: Iterable[Any]) -> list[list[Any]]:
    """Lists, arrays or tensors, or the rows of one; `name` is that of the argument. Raises `NotJson`."""
    lists: list[list[Any]] = json_value([row.tolist() if hasattr(row, "tolist") else list(row) for row in rows], name)
    return lists


def finite_or_none(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None

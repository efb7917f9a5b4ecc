"""The bodies of `POST /rollout`, `/jobs`, `/score` and `/rollouts/logprobs`, and their options. No I/O."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from rollout_client.calls.call import without_none
from rollout_client.calls.json_values import as_given, json_bytes, json_value, list_of
from rollout_client.calls.options import CallOptions, without_call_options
from rollout_client.contract.base import PolicyDemand, Priority
from rollout_client.contract.rollouts import Keep, ObservationFormat, SampleInput, SampleResult, Sampling
from rollout_client.contract.selection import SampleRange

HEARTBEAT_S = 15
"""The service sends an empty line on a stream that is silent for so long: proxies commonly close one after 60 s."""

Samples = Sequence[SampleInput | Mapping[str, Any]]


class RolloutOptions(CallOptions, total=False):
    """Options of a rollout. The service's defaults apply to keys that are missing or `None`."""

    samples_from: Sequence[SampleRange | Mapping[str, Any]] | None
    """In place of samples: ranges of those that tasks of the service have. The answer has the ranges that follow."""
    num_generations: int | None
    """Rollouts of each sample: one group."""
    sampling: Sampling | Mapping[str, Any] | None
    max_seq_len: int | None
    """In tokens: prompt, generations and observations together."""
    max_rollout_turns: int | None
    schedule: Literal["async", "lockstep"] | None
    observation_format: ObservationFormat | None
    history: Literal["append", "template"] | None
    chat_template_kwargs: Mapping[str, Any] | None
    deadline_s: float | None
    """Seconds after which the rollouts that still run are returned as they are."""
    on_error: Literal["return", "fail"] | None
    sample_retries: int | None
    """How often the service repeats a generation or environment step of one sample after a failure of the fleet; the
    request's field `retries`. `retries` is the number of further attempts of the whole request, by the client."""
    keep: Keep | Mapping[str, Any] | None
    """When enough rollouts are done; the service cancels the rest. With `where` it drops groups that teach nothing."""
    policy: PolicyDemand | Mapping[str, Any] | None
    """Which weights may generate the rollouts: `min_version`, `version`, `max_staleness`; see `RolloutDemand`."""
    include: Sequence[str] | None
    """Further numbers of each token: `routed_experts`, `top_logprobs:N`, `sampling_mask`, `entropy`."""
    priority: Priority | None
    """The share of the engines while other requests wait too: a name, or a number in proportion to `train`."""


def rollout_body(samples: Samples, options: RolloutOptions) -> bytes:
    """Holds only what was given, so that the service alone has defaults and checks.

    Raises `NotJson` if `samples` or `options` hold a value that JSON does not have.
    """
    given = given_options(options, "sample_retries")
    # The service refuses a request without samples, unless it says where they come from.
    if samples or "samples_from" not in given:
        given = {"samples": [as_given(sample) for sample in samples], **given}
    return json_bytes(given)


def given_options(options: Mapping[str, Any], retries_option: str) -> dict[str, object]:
    """The fields of the request that `options` set, by their names on the wire; `retries_option` is its `retries`."""
    given = {name: as_given(value) for name, value in without_none(without_call_options(options)).items()}
    if retries_option in given:
        given["retries"] = given.pop(retries_option)
    return given


def group_size(options: RolloutOptions) -> int:
    """How many rollouts a group has."""
    return options.get("num_generations") or 1


def rollout_count(samples: Samples, options: RolloutOptions) -> int:
    """How many rollouts the answer has; with `keep.where`, at most."""
    keep: Mapping[str, Any] = json_value(as_given(options.get("keep"))) or {}
    if keep.get("where") is not None:
        return (keep.get("groups") or 0) * group_size(options)
    ranges = json_value(as_given(list(options.get("samples_from") or ())))
    left_out = sum(places["count"] for drawn in ranges for places in drawn.get("without", ()))
    count = len(samples) + sum(drawn["count"] for drawn in ranges) - left_out
    return int(count * group_size(options))


class ScoreOptions(CallOptions, total=False):
    """Options of a score. The service's defaults apply to keys that are missing or `None`."""

    top_k: int | None
    """Number of the most likely tokens that come back too for each position."""
    start: int | Sequence[int] | None
    """The first position that is asked for; one number for all sequences, or one for each."""
    policy: PolicyDemand | Mapping[str, Any] | None
    """The weights that score."""
    priority: Priority | None
    """The share of the engines while other requests wait too: a name, or a number in proportion to `train`."""
    sequence_retries: int | None
    """How often the service repeats the scoring of one sequence after a failure of the fleet; the request's field
    `retries`. `retries` is the number of further attempts of the whole request, by the client."""


def score_body(sequences: Iterable[Iterable[int]], options: ScoreOptions) -> bytes:
    """Each sequence is a list of token ids, or a one-dimensional array or tensor of them."""
    return json_bytes({"sequences": [*map(list_of, sequences)], **given_options(options, "sequence_retries")})


class TrainerRows(TypedDict, total=False):
    """Arguments of `report_logprobs` that have a row for each rollout."""

    masks: Iterable[Any] | None
    token_ids: Iterable[Any] | None
    starts: Iterable[int] | None


class ReportColumns(TrainerRows, total=False):
    """All of these arguments."""

    rollouts: Iterable[str | SampleResult]
    logprobs: Iterable[Any]


class ReportOptions(TrainerRows, CallOptions, total=False):
    """Options of `report_logprobs`, which describes them."""

    weight_version: str | None


def report_body(
    rollouts: Iterable[str | SampleResult | None], logprobs: Iterable[Any], options: ReportOptions
) -> bytes:
    """Raises `ValueError` unless there is one row of numbers for each rollout, and each has an id."""
    columns: dict[str, list[Any]] = {
        "rollout_id": [*map(id_of, rollouts)],
        "logprobs": [[*map(finite_or_none, row)] for row in rows_of("logprobs", logprobs)],
    }
    if (masks := options.get("masks")) is not None:
        columns["mask"] = [[*map(bool, row)] for row in rows_of("masks", masks)]
    if (token_ids := options.get("token_ids")) is not None:
        columns["token_ids"] = rows_of("token_ids", token_ids)
    if (starts := options.get("starts")) is not None:
        columns["start"] = [*map(int, starts)]
    count = len(columns["rollout_id"])
    for name, rows in columns.items():
        if len(rows) != count:
            raise ValueError(f"{name} has {len(rows)} rows for {count} rollouts: give one for each")
    if (version := options.get("weight_version")) is not None:
        columns["weight_version"] = [version] * count
    reports = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json_bytes({"reports": reports})


def id_of(rollout: str | SampleResult | None) -> str:
    name = rollout.rollout_id if isinstance(rollout, SampleResult) else rollout
    if name is None:
        raise ValueError("a rollout has no rollout_id")
    return name


def rows_of(name: str, rows: Iterable[Any]) -> list[list[Any]]:
    """Lists, arrays or tensors, or the rows of one; `name` is that of the argument. Raises `NotJson`."""
    return cast(list[list[Any]], json_value([*map(list_of, rows)], name))


def finite_or_none(value: float | None) -> float | None:
    """JSON has no other numbers; a score has none for a first token."""
    return value if value is not None and math.isfinite(value) else None

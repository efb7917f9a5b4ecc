"""Reads the bodies of `POST /rollouts/logprobs`, as JSON or Arrow."""

from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from deployments.rollout_records.comparison import TrainerReport
from rollout_client.arrow.schema import LOGPROBS_REPORT
from rollout_client.contract.mismatch import MOST_REPORTS, LogprobsReport, TrainerLogprobs
from rollout_client.contract.problems import FieldProblem
from service.problems import invalid_request, unreadable_body, validation_problem
from service.rollout_requests.arrow_body import read_table


def reports_of_json(body: bytes | bytearray) -> list[TrainerReport]:
    """Raises `RequestProblem`: the body is not a `LogprobsReport`."""
    try:
        given = LogprobsReport.model_validate_json(body)
    except ValidationError as error:
        raise validation_problem(error) from error
    return [_report_of(one, one.rollout_id) for one in given.reports]


def report_of_json(body: bytes | bytearray, rollout_id: str) -> TrainerReport:
    """Raises `RequestProblem`: the body is not a `TrainerLogprobs`."""
    try:
        return _report_of(TrainerLogprobs.model_validate_json(body), rollout_id)
    except ValidationError as error:
        raise validation_problem(error) from error


def _report_of(given: TrainerLogprobs, rollout_id: str) -> TrainerReport:
    return TrainerReport(
        rollout_id,
        np.array([np.nan if logprob is None else logprob for logprob in given.logprobs], np.float64),
        None if given.mask is None else np.array(given.mask, bool),
        None if given.token_ids is None else np.array(given.token_ids, np.int64),
        given.weight_version,
        given.start,
    )


def reports_of_arrow(body: bytes | bytearray) -> list[TrainerReport]:
    """Raises `RequestProblem`: it is not an Arrow stream of `LOGPROBS_REPORT`, or has more than `MOST_REPORTS` rows."""
    try:
        table = read_table(body, LOGPROBS_REPORT, "logprobs", "reports[]")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable_body(f"{str(error).rstrip('.')}; send one Arrow stream of reports") from error
    if "rollout_id" not in table.schema.names:
        raise invalid_request(FieldProblem(field="reports[].rollout_id", message="this column is missing"))
    if len(table) > MOST_REPORTS:
        message = f"{len(table)} reports, and a body may have {MOST_REPORTS}: send them in several"
        raise invalid_request(FieldProblem(field="reports", message=message))
    columns = {name: table[name] for name in table.schema.names}
    if missing := [name for name in ("rollout_id", "logprobs") if columns[name].null_count]:
        raise invalid_request(FieldProblem(field=f"reports[].{missing[0]}", message="a row has none"))
    rows = range(len(table))
    return [TrainerReport(**{name: _value_of(column[row]) for name, column in columns.items()}) for row in rows]


def _value_of(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    return value.values.to_numpy(zero_copy_only=False) if isinstance(value, pa.ListScalar) else value.as_py()

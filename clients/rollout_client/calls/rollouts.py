"""The calls of `/rollout`, `/score`, `/tasks`, `/info`, `/blobs` and `/readyz`: the request and the response of each.

No I/O.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from rollout_client.calls.call import JSON, NDJSON, Call, call_for, call_without_result, without_none
from rollout_client.calls.json_values import as_given, json_bytes, json_value
from rollout_client.calls.options import CallOptions, without_call_options
from rollout_client.contract.base import PolicyDemand, Priority
from rollout_client.contract.info import (
    BlobInfo,
    Ready,
    ScoreResponse,
    ServiceInfo,
    TaskInfo,
    TaskList,
    TaskSamples,
    Vocabulary,
)
from rollout_client.contract.rollouts import Keep, ObservationFormat, SampleInput, Sampling
from rollout_client.contract.selection import SampleRange
from rollout_client.errors import needed_for
from rollout_client.responses import PlayedRollouts

if TYPE_CHECKING:
    from rollout_client.calls.arrow_bodies import ArrowResponse

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


def tasks_call() -> Call[list[TaskInfo]]:
    return call_for(TaskList, "GET", "/tasks").picking(lambda found: found.tasks)


def task_samples_call(task_name: str, count: int, start: int, seed: int | None, split: str | None) -> Call[TaskSamples]:
    query = {"count": count, "start": start, "seed": seed, "split": split}
    return call_for(TaskSamples, "GET", f"/tasks/{quote(task_name, safe='')}/samples", query=query)


def info_call() -> Call[ServiceInfo]:
    return call_for(ServiceInfo, "GET", "/info")


def vocabulary_call() -> Call[Vocabulary]:
    return call_for(Vocabulary, "GET", "/info/vocabulary")


def readiness_call() -> Call[Ready]:
    return call_for(Ready, "GET", "/readyz")


def rollout_call(samples: Samples, options: RolloutOptions) -> Call[PlayedRollouts]:
    """Raises `NotJson` if `samples` or `options` hold a value that JSON does not have."""
    return call_for(PlayedRollouts, "POST", "/rollout", body=rollout_body(samples, options))


def arrow_rollout_call(samples: Samples, options: RolloutOptions) -> "Call[ArrowResponse]":
    """Raises what `rollout_call` raises, and `ModuleNotFoundError` without pyarrow, which the `arrow` extra brings."""
    with needed_for("Arrow", "arrow"):
        from rollout_client.arrow.schema import ARROW
        from rollout_client.calls.arrow_bodies import joined_body, read_response

    body, headers = rollout_body(samples, options), {"content-type": JSON}
    return Call("POST", "/rollout", read_response, accept=ARROW, body=body, content_headers=headers, join=joined_body)


def streamed_rollout_call(samples: Samples, options: RolloutOptions) -> Call[bytes]:
    """Raises `NotJson` if `samples` or `options` hold a value that JSON does not have."""
    headers = {"content-type": JSON, "prefer": f"heartbeat={HEARTBEAT_S}"}
    return Call("POST", "/rollout", bytes, accept=NDJSON, body=rollout_body(samples, options), content_headers=headers)


def end_run_call() -> Call[None]:
    """Ends the run of the `Idempotency-Key` with which it is sent."""
    return call_without_result("DELETE", "/jobs")


def rollout_body(samples: Samples, options: RolloutOptions) -> bytes:
    """Holds only what was given, so that the service alone has defaults and checks."""
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


def score_call(sequences: Iterable[Iterable[int]], options: ScoreOptions) -> Call[ScoreResponse]:
    """Each sequence is a list of token ids, or a one-dimensional array or tensor of them."""
    given = given_options(options, "sequence_retries")
    body = json_bytes({"sequences": [list_of(sequence) for sequence in sequences], **given})
    return call_for(ScoreResponse, "POST", "/score", body=body)


def list_of(sequence: Any) -> list[int]:
    ids: list[int] = sequence.tolist() if hasattr(sequence, "tolist") else list(sequence)
    return ids


def upload_image_call(image: bytes) -> Call[str]:
    """Its result is the name of the image. The service reads the type from the content."""
    octets = {"content-type": "application/octet-stream"}
    call = call_for(BlobInfo, "POST", "/blobs", body=image, content_headers=octets)
    return call.picking(lambda info: info.name)


def image_call(name: str) -> Call[bytes]:
    return Call("GET", f"/blobs/{quote(name, safe='')}", bytes, accept="image/*")

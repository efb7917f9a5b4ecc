"""Rules for attributes and samples of an environment, which need no step. Each function yields or returns problems."""

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollout_env.environment import LostSession, TaskEnvironment, has_a_start, has_a_step
from rollout_env.play import prompt_of
from rollout_env.records import JsonObject
from rollout_env.steps import problems_of

JSON_OBJECT = TypeAdapter(JsonObject)
MANY_SAMPLES = 64
"""Size of a large request for samples."""
FEW_SAMPLES = 8
"""Fewer different samples may come in the same order for two seeds by chance."""
TOOLS = TypeAdapter(list[JsonObject] | tuple[JsonObject, ...])


def attribute_problems(environment: TaskEnvironment) -> Iterator[str]:
    """Problems with its class attributes, and a missing step."""
    if not has_a_step(type(environment)):
        yield "it implements neither step nor step_batch nor open_session"
    description = getattr(environment, "description", None)
    if not (isinstance(description, str) and description.strip()):
        yield "description must be a sentence about the task"
    try:
        TOOLS.validate_python(environment.tools)
    except ValidationError as error:
        yield f"tools must be a list of JSON schemas: {problems_of(error, 'tools')}"
    for name in ("max_concurrent_steps", "max_sessions"):
        limit = getattr(environment, name)
        if limit is not None and not (isinstance(limit, int) and limit >= 1):
            yield f"{name} must be an integer of at least 1, or None"
    if environment.lost_session not in get_args(LostSession):
        yield f"lost_session must be one of {', '.join(get_args(LostSession))}, got {environment.lost_session!r}"
    if not environment.session_idle_s > 0:
        yield f"session_idle_s must be above 0, got {environment.session_idle_s}"
    fields = getattr(environment, "ExtraEnvInfo", None)
    if not (isinstance(fields, type) and issubclass(fields, BaseModel)):
        yield "ExtraEnvInfo must be a pydantic model, the fields of extra_env_info"
        return
    try:
        fields.model_json_schema()
    except Exception as error:  # noqa: BLE001 - pydantic and the model's own code raise many types
        yield f"ExtraEnvInfo has no JSON schema, which GET /tasks shows: {type(error).__name__}: {error}"


def example_problems(environment: TaskEnvironment, count: int, seed: int) -> Iterator[str]:
    """Problems with the example samples taken together."""
    samples, again = environment.example_samples(count, seed), environment.example_samples(count, seed)
    if samples != again:
        yield f"example_samples({count}, seed={seed}) returned different samples the second time"
    if len(samples) != count:
        yield f"example_samples({count}, seed={seed}) returned {len(samples)} samples"
    if (different := different_samples(samples)) < len(samples):
        yield f"example_samples({count}, seed={seed}) returned only {different} different samples"


def different_samples(samples: list[JsonObject]) -> int:
    return len({json.dumps(sample, sort_keys=True, default=repr) for sample in samples})


def many_examples_problems(environment: TaskEnvironment, seed: int) -> Iterator[str]:
    """Problems with the example samples when a request asks for many."""
    samples, others = (environment.example_samples(MANY_SAMPLES, each) for each in (seed, seed + 1))
    call = f"example_samples({MANY_SAMPLES}, seed={seed})"
    if len(samples) != MANY_SAMPLES:
        yield f"{call} returned {len(samples)} samples; repeat them where there are no more"
    if samples == others and different_samples(samples) >= FEW_SAMPLES:
        yield f"{call} returned the same samples as with seed {seed + 1}; choose or order them by the seed"
    for place, sample in enumerate(samples):
        if problem := next(sample_problems(environment, sample), None):
            yield f"sample {place} of {call} is not a sample: {problem}"
            return


def sample_problems(environment: TaskEnvironment, sample: Any) -> Iterator[str]:
    """Problems with one sample, posted to the service as it is."""
    try:
        JSON_OBJECT.validate_python(sample)
    except ValidationError as error:
        yield f"it is not JSON: {problems_of(error, 'sample')}"
        return
    try:
        if not (prompt_of(sample) or has_a_start(type(environment))):
            yield "The sample has no prompt: give it messages, at least one"
    except ValueError as error:
        yield str(error).rstrip(".")
    if problem := extra_env_info_problem(environment, sample.get("extra_env_info") or {}):
        yield problem


def extra_env_info_problem(environment: TaskEnvironment, extra_env_info: dict[str, Any]) -> str | None:
    """Reason why `extra_env_info` is not valid for `ExtraEnvInfo`, if it is not."""
    try:
        environment.ExtraEnvInfo.model_validate(extra_env_info)
    except ValidationError as error:
        return f"ExtraEnvInfo does not accept it: {problems_of(error, 'extra_env_info')}"
    except Exception as error:  # noqa: BLE001 - a validator of the environment's own raises what it wants
        return f"ExtraEnvInfo raised {type(error).__name__}: {error}"
    return None

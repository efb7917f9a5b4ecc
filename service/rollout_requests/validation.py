"""Finds all problems of a request before anything is started. Pure functions, no I/O.

The types of the contract have checked each field alone; here a request is checked against itself and against what the
service has: its tasks, its model's limits, its own limits.
"""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from pydantic import JsonValue

from deployments.chat.chat_template import RENDERING_ARGUMENTS
from deployments.protocols.generation import TIED_TOKENS
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import RolloutRequest, SampleInput, SampleResult
from rollout_client.contract.sessions import SessionRequest
from service.problems import invalid_request, unknown_task, unknown_token
from service.rollout_requests.parsing import rollouts_problem
from service.settings import RequestLimits


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The tasks, model and limits of the service."""

    task_names: Set[str]
    generator: GeneratorDescription
    limits: RequestLimits
    started_tasks: Set[str] = frozenset()
    """Tasks whose environments may make the first messages themselves."""
    agent_tasks: Set[str] = frozenset()
    """Tasks that programs play."""
    unforkable_tasks: Set[str] = frozenset()
    """Tasks whose sessions begin only at a prompt."""


def request_problems(request: RolloutRequest, capabilities: Capabilities) -> Iterator[FieldProblem]:
    """Yields every problem of the request; none if it can be played."""
    yield from _size_problems(request, capabilities)
    yield from keep_problems(request)
    yield from engine_problems(request, capabilities.generator)
    yield from _template_problems("chat_template_kwargs", request.chat_template_kwargs)
    played = {sample.task_name for sample in request.samples} & capabilities.agent_tasks
    for name, choice in (("schedule", "lockstep"), ("history", "template")):
        if played and getattr(request, name) == choice:
            message = f"a program plays {', '.join(sorted(played))}, and has no turns in lockstep or of the service's"
            yield FieldProblem(field=name, message=f"{message}; leave it out", value=choice)
    asked = {request.observation_format, *(sample.observation_format for sample in request.samples), *request.include}
    if request.history == "template" and asked & {"raw", "routed_experts"}:
        message = "no template renders raw observations, and no prompt that changes has routed_experts; leave it out"
        yield FieldProblem(field="history", message=message, value=request.history)
    for position, sample in enumerate(request.samples):
        yield from _sample_problems(f"samples[{position}]", sample, capabilities)


def refuse_large_echo(request: RolloutRequest, body_bytes: int, limits: RequestLimits) -> None:
    """Raises `RequestProblem` (422) if the results would repeat too much of the samples."""
    num_generations = request.num_generations
    if request.keep.where is not None:
        # Only the groups that are kept are in the answer.
        body_bytes = body_bytes * min(request.keep.groups or 1, request.sample_count) // request.sample_count
    most_bytes, echoed_bytes = limits.max_echoed_bytes_per_request, body_bytes * num_generations
    if echoed_bytes > most_bytes:
        message = (
            f"the results of {num_generations} generations repeat a body of {body_bytes} bytes, and may repeat "
            f"{most_bytes} bytes; ask for fewer generations or send less with each sample"
        )
        raise invalid_request(FieldProblem(field="num_generations", message=message, value=num_generations))


def _size_problems(request: RolloutRequest, capabilities: Capabilities) -> Iterator[FieldProblem]:
    max_rollouts = capabilities.limits.max_rollouts_per_request
    if problem := rollouts_problem(len(request.samples), request.num_generations, max_rollouts):
        yield problem
    max_model_len = capabilities.generator.max_model_len
    if (request.max_seq_len or 0) > max_model_len:
        yield FieldProblem(
            field="max_seq_len",
            message=f"the model takes at most {max_model_len} tokens; ask for no more",
            value=request.max_seq_len,
        )


def keep_problems(request: RolloutRequest) -> Iterator[FieldProblem]:
    keep, samples = request.keep, request.sample_count
    if (keep.per_group or 0) > request.num_generations:
        message = f"a group has only {request.num_generations} rollouts; keep fewer or raise num_generations"
        yield FieldProblem(field="keep.per_group", message=message, value=keep.per_group)
    if (keep.groups or 0) > samples:
        message = f"there are only {samples} groups, one per sample; keep fewer, or draw more"
        yield FieldProblem(field="keep.groups", message=message, value=keep.groups)
    if keep.where is None:
        return
    if keep.groups is None:
        message = "it is missing, and keep.where draws samples until so many groups are kept; send it"
        yield FieldProblem(field="keep.groups", message=message)
    if request.schedule == "lockstep":
        message = "keep.where draws further groups while others play, which have no turns in lockstep; choose async"
        yield FieldProblem(field="schedule", message=message, value=request.schedule)


def engine_problems(
    request: RolloutRequest | SessionRequest, generator: GeneratorDescription
) -> Iterator[FieldProblem]:
    """Checks that the engines can sample as is asked, and that they and the sampling support the `include` columns."""
    most, sampling = generator.max_logprobs, request.sampling
    if sampling.min_p and generator.drafts:
        message = f"the engines draft tokens ({generator.drafts}), and vLLM has no min_p then; leave it out"
        yield FieldProblem(field="sampling.min_p", message=message, value=sampling.min_p)
    highest = math.inf if most is None else most - TIED_TOKENS
    for place, name in enumerate(request.include):
        kind, _, count = name.partition(":")
        message = ""
        if kind == "routed_experts" and not generator.returns_experts:
            message = (
                "the engines do not return the experts of tokens; serve a mixture of experts with "
                "enable_return_routed_experts: true under engine"
            )
        if kind == "top_logprobs" and most is not None and int(count) > most:
            message = f"the engines name at most {most} tokens; ask for fewer, or raise max_logprobs under engine"
        if kind in ("sampling_mask", "entropy"):
            if sampling.greedy or not sampling.temperature:
                message = "greedy decoding draws from no distribution; leave it out, or set sampling.temperature"
            elif not 1 <= sampling.top_k <= highest:
                bound = "at least 1" if most is None else f"from 1 to {highest}"
                message = (
                    f"it needs sampling.top_k {bound}: without a bound all tokens of the vocabulary could be sampled"
                )
        if message:
            yield FieldProblem(field=f"include[{place}]", message=message, value=name)


def _sample_problems(field: str, sample: SampleInput, capabilities: Capabilities) -> Iterator[FieldProblem]:
    """Yields the problems of one sample; `field` is its path in the request."""
    if sample.task_name not in capabilities.task_names:
        yield unknown_task(f"{field}.task_name", sample.task_name, capabilities.task_names)
    if sample.message_log is not None and sample.task_name in capabilities.agent_tasks:
        taken = "a program plays this task, and cannot go on with a log; post the sample's messages in its place"
        yield FieldProblem(field=f"{field}.message_log", message=taken)
    if sample.fork is not None and sample.message_log is not None:
        yield from _fork_problems(f"{field}.fork", sample, sample.message_log, capabilities)
    makes_its_prompt = sample.task_name in capabilities.started_tasks | capabilities.agent_tasks
    if sample.messages is None and sample.message_log is None and not makes_its_prompt:
        missing = "messages and message_log are both missing: send one of them as the prompt"
        yield FieldProblem(field=field, message=missing)
    yield from _template_problems(f"{field}.chat_template_kwargs", sample.chat_template_kwargs)
    yield from further_field_problems(field, sample)
    if sample.message_log and not any(message.token_ids for message in sample.message_log):
        yield FieldProblem(field=f"{field}.message_log", message="it has no token; send at least one")
    for index, message in enumerate(sample.message_log or ()):
        place = f"{field}.message_log[{index}].token_ids"
        if problem := unknown_token(place, message.token_ids, capabilities.generator.vocab_size):
            yield problem


def _fork_problems(
    field: str, sample: SampleInput, message_log: Sequence[Message], capabilities: Capabilities
) -> Iterator[FieldProblem]:
    """Yields the problem of a fork with turns that its environment cannot go on from."""
    has_steps = any(message.generation_logprobs is not None for message in message_log[:-1])
    if has_steps and sample.task_name in capabilities.unforkable_tasks:
        message = (
            f"the environment of task {sample.task_name!r} holds a session for each rollout and cannot make one that "
            "stands at a later turn: it has no fork_session; fork at turn 0, or give it that method"
        )
        yield FieldProblem(field=field, message=message)


def further_field_problems(
    field: str, sample: SampleInput, result: type[SampleResult] = SampleResult
) -> Iterator[FieldProblem]:
    """Yields the problems of the fields that come back unchanged, in a `result`."""
    for name in (sample.model_extra or {}).keys() & result.model_fields.keys():
        message = "this is a field of the result; give the further field another name"
        yield FieldProblem(field=f"{field}.{name}", message=message)
    for name, value in (sample.model_extra or {}).items():
        if not _is_finite(value):
            message = "it holds a number beyond those of 64 bits, such as 1e999, which would come back as null"
            yield FieldProblem(field=f"{field}.{name}", message=message)


def _is_finite(value: object) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _template_problems(field: str, chat_template_kwargs: dict[str, JsonValue] | None) -> Iterator[FieldProblem]:
    for name in RENDERING_ARGUMENTS & (chat_template_kwargs or {}).keys():
        yield FieldProblem(field=f"{field}.{name}", message="the service sets this argument itself; leave it out")

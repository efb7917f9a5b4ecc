"""Lets the environment of a session's task judge what the session has generated."""

from collections.abc import Mapping, Sequence
from uuid import uuid4

from deployments.failures import RolloutFailure
from deployments.protocols.chat import judged_log
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Environment
from deployments.sessions.failures import GenerationUnknown, JudgementFailed, SessionNotJudgeable
from rollout_client.contract.messages import Message
from rollout_client.contract.sessions import SessionSample
from rollout_env import StepOutcome
from service.rollouts.metrics import UNNAMED_REWARD
from service.rollouts.retries import RetryBudget, with_retries

_RETRIES = 2
"""Retries of a step that fails because its replica does."""


class SessionJudge:
    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = environments

    async def rewards(
        self, samples: Sequence[SessionSample], request_id: str, generation_id: str | None = None
    ) -> dict[str, float]:
        """The reward of one step of the environment, by names.

        Args:
            samples: the branches of a session.
            generation_id: the message that is judged, with the conversation before it; by default the last one.

        Raises:
            SessionNotJudgeable: nothing was generated, or the session has no task that the service knows.
            GenerationUnknown
            JudgementFailed: the environment refuses the conversation, or breaks.
        """
        sample = _judged_sample(samples, generation_id)
        environment = self._environments.get(sample.task_name)
        if environment is None:
            raise _not_judgeable(_without_task(sample.task_name, self._environments), sample.session_id)
        step = StepRequest(
            message_log=judged_log(_log_up_to(sample, generation_id)),
            extra_env_info=sample.extra_env_info,
            request_id=request_id,
            rollout_id=sample.session_id,
            sample=sample.idx,
            step_id=uuid4().hex,
            # Of this judgement alone: an agent steps no environment, so that no session of one goes on.
            session_id=uuid4().hex,
        )
        try:
            budget = RetryBudget({"request_id": request_id, "session_id": sample.session_id}, _RETRIES)
            return named(await with_retries(lambda: environment.step(step), budget))
        except RolloutFailure as failure:
            message = str(failure).removesuffix(".")
            raise JudgementFailed.of("judge", message, failure.kind) from failure
        finally:
            environment.release(step.session_id)


def _judged_sample(samples: Sequence[SessionSample], generation_id: str | None) -> SessionSample:
    """The branch that was generated last, of those that hold the message.

    Raises `SessionNotJudgeable` or `GenerationUnknown`.
    """
    if not samples:
        raise _not_judgeable("it has generated nothing yet, or it is gone", None)
    held = [sample for sample in samples if generation_id is None or generation_id in sample.generation_ids]
    if not held:
        message = "the session has generated no such message"
        raise GenerationUnknown.of("generation_id", message, generation_id)
    return held[-1]


def _log_up_to(sample: SessionSample, generation_id: str | None) -> Sequence[Message]:
    """The conversation whose last message is judged."""
    if generation_id is None:
        return sample.message_log
    places = [place for place, message in enumerate(sample.message_log) if message.generation_logprobs is not None]
    return sample.message_log[: places[sample.generation_ids.index(generation_id)] + 1]


def named(outcome: StepOutcome) -> dict[str, float]:
    return outcome.reward if isinstance(outcome.reward, dict) else {UNNAMED_REWARD: outcome.reward}


def _without_task(task_name: str, environments: Mapping[str, Environment]) -> str:
    if not task_name:
        return "it was opened without a sample, whose task_name names the environment; send a reward"
    return f"the service has no task {task_name!r}, only {', '.join(environments)}; send a reward"


def _not_judgeable(message: str, value: str | None) -> SessionNotJudgeable:
    return SessionNotJudgeable.of("judge", message, value)

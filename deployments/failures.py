"""Every way in which a sample can fail, and the base of every refusal of a store.

- *Named* here: one class per way, with the `kind` of boundary that broke and whether a retry can help.
- *Raised* where it happens: by the engines, the environment host, the calls between deployments, the loop.
- *Logged* where it becomes data: by the replica that returns it as a result, and by the loop.
- *Classified* once, by `failure_of`.
- *Reported* as the sample's `status: error` and its `error`. A failed sample never affects its siblings.

`retryable` divides the failures in two. Those of the fleet (a dead replica, a lost connection, a full queue) are
retryable, because the same turn can succeed on another replica. Those of the sample itself (too long, rejected by its
environment) are not.

`StoreFailure` is the base of refusals by the policy, job, session and image stores. The ingress answers with problem
documents.
"""

from typing import Any, ClassVar, Self

from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import FailureKind, SampleError
from rollout_env.records import escaped_half_surrogates


class StoreFailure(Exception):
    """A call of a store was not carried out, with what is wrong, field by field."""

    status: ClassVar[int] = 422
    name: ClassVar[str]
    title: ClassVar[str]
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @classmethod
    def of(cls, field: str, message: str, value: Any = None) -> Self:
        """The failure with one problem."""
        return cls(FieldProblem(field=field, message=message, value=value))

    def __str__(self) -> str:
        return " ".join(f"{problem.field}: {problem.message}." for problem in self.problems)


class RolloutFailure(Exception):
    """A failure of one sample. Its message is a sentence for the user."""

    kind: ClassVar[FailureKind] = "internal"
    retryable: ClassVar[bool] = False
    costs_a_retry: ClassVar[bool] = True
    """Whether a retry counts against the sample's `retries`."""
    same_call_can_succeed: ClassVar[bool] = True
    """Whether a retryable failure lets the call alone be made again, and not only the whole rollout."""

    def __str__(self) -> str:
        """The message, which any answer can be written with, whatever an environment or a model has put into it."""
        return escaped_half_surrogates(super().__str__())


class PromptRejected(RolloutFailure):
    """The prompt cannot be played: it is too long, or the chat template cannot render it."""

    kind = "request"


class GenerationRejected(RolloutFailure):
    """The engine refused the request, as every other replica would."""

    kind = "generation"


class GenerationLost(RolloutFailure):
    """The engine or its replica broke while generating."""

    kind = "generation"
    retryable = True


class ReplicaShuttingDown(GenerationLost):
    """Serve shuts the generator's replica down, and another one goes on with the generation."""

    costs_a_retry = False


class GenerationNotFinite(GenerationLost):
    """The engine gave a log-probability that is NaN or infinite, so its tokens were not sampled from the policy."""


class EnvironmentRejected(RolloutFailure):
    """The environment cannot step this sample: its `extra_env_info` is not what the task needs."""

    kind = "environment"


class EnvironmentBroken(RolloutFailure):
    """The environment's own code raised an exception, or returned an invalid outcome."""

    kind = "environment"


class EnvironmentLost(RolloutFailure):
    """The environment's replica broke during the step."""

    kind = "environment"
    retryable = True


class EnvironmentShuttingDown(EnvironmentLost):
    """Serve shuts the environment's replica down, and another one makes the step again."""

    costs_a_retry = False


class AgentFailed(RolloutFailure):
    """The program that plays the task raised, ended with an exit code, or answered an error."""

    kind = "environment"


class AgentTimedOut(AgentFailed):
    """The program that plays the task was ended after its time. The same rollout may be faster another time."""

    retryable = True
    same_call_can_succeed = False


class VerifierFailed(RolloutFailure):
    """The verifier of a task judged nothing.

    It gave no reward, or no number, was ended after its time, or would not have been alone in the sandbox.
    """

    kind = "environment"


class SessionLost(RolloutFailure):
    """The state at a replica of the environment is gone, and the environment lets no rollout begin anew."""

    kind = "environment"
    retryable = True
    same_call_can_succeed = False


class RestartableSessionLost(SessionLost):
    """The rollout is played anew from its prompt."""


class PolicyStoreLost(RolloutFailure):
    """The policy store broke during the call. Serve restarts it from its last durable state."""

    retryable = True


class StoreLost(RolloutFailure):
    """A store broke during the call, or its database. Serve restarts it with all that it has stored."""

    retryable = True


class JobStoreLost(StoreLost):
    """The job store broke during the call."""


class SessionStoreLost(StoreLost):
    """The session store broke during the call."""


class ImagesLost(StoreLost):
    """The image store broke during the call."""


class RolloutRecordsLost(StoreLost):
    """The store of the records of rollouts broke during the call; its records are lost."""


class DataLost(RolloutFailure):
    """The deployment that holds the data of the tasks broke during the call."""

    retryable = True


class OtherVersionLoaded(RolloutFailure):
    """The generator replica has other weights than those that must generate, or not the policy that must.

    Another replica may have them, until an update of the weights has ended, or this one soon.
    """

    kind = "policy"
    retryable = True
    costs_a_retry = False


class VersionReplaced(RolloutFailure):
    """A newer version took the place of the one that must generate every token of the rollout, before its end."""

    kind = "policy"


class TokensTooOld(RolloutFailure):
    """Older versions than the session permits have generated what the call continues."""

    kind = "policy"


class PolicyDropped(RolloutFailure):
    """The named policy that must generate has no version any more: it was dropped, or its base was replaced."""

    kind = "policy"


class TurnTimedOut(RolloutFailure):
    """A generation had no new token, or a step no answer, for longer than its limit."""

    kind = "timeout"
    retryable = True


class Overloaded(RolloutFailure):
    """The engine's queue is full."""

    kind = "overload"
    retryable = True


def failure_of(exception: Exception) -> SampleError:
    """The error of a sample that an exception broke. One that is no `RolloutFailure` is `internal`, not retryable."""
    if isinstance(exception, RolloutFailure):
        return SampleError(kind=exception.kind, message=str(exception), retryable=exception.retryable)
    message = escaped_half_surrogates(f"{type(exception).__name__}: {exception}")
    return SampleError(kind="internal", message=message, retryable=False)

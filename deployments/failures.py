"""Every way a sample can fail.

- *Named* here, one class per way, each with the `kind` of boundary that broke and whether a retry can help.
- *Raised* where it happens: the engine wrapper, the environment host, the hop between replicas, the loop.
- *Classified* once, in `failure_of`.
- *Surfaced* as the sample's `status: error` and its `error`; a failed sample never touches its siblings.

`retryable` splits failures in two: those of the fleet (a dead replica, a lost connection, a full queue), where the
same turn can succeed elsewhere, and those of the sample itself (too long, rejected by its environment), where it
cannot.
"""

from typing import ClassVar

from rollout_client.contract import FailureKind, SampleError


class RolloutFailure(Exception):
    """A failure of one sample; its message is a sentence for the user."""

    kind: ClassVar[FailureKind] = "internal"
    retryable: ClassVar[bool] = False
    costs_a_retry: ClassVar[bool] = True
    """Whether trying again counts against the sample's `retries`."""


class PromptRejected(RolloutFailure):
    """The sample's own prompt cannot be played (too long, not renderable by the chat template)."""

    kind = "request"


class GenerationRejected(RolloutFailure):
    """The engine refused the request: another replica would refuse it too."""

    kind = "generation"


class GenerationLost(RolloutFailure):
    """The engine or its replica broke while generating."""

    kind = "generation"
    retryable = True


class GenerationCut(GenerationLost):
    """An update of the weights cut the generation, as whoever pushed them wanted."""

    costs_a_retry = False


class EnvironmentRejected(RolloutFailure):
    """The environment cannot take this sample: its `extra_env_info` is not what the task needs."""

    kind = "environment"


class EnvironmentBroken(RolloutFailure):
    """The environment's own code raised, or answered something that is no outcome."""

    kind = "environment"


class EnvironmentLost(RolloutFailure):
    """The environment's replica broke during the step."""

    kind = "environment"
    retryable = True


class PolicyStoreLost(RolloutFailure):
    """The policy store broke during the call; it comes back with what it had made durable."""

    retryable = True


class TurnTimedOut(RolloutFailure):
    """A generation or a step took longer than its limit."""

    kind = "timeout"
    retryable = True


class Overloaded(RolloutFailure):
    """The engine's queue is full."""

    kind = "overload"
    retryable = True


def failure_of(exception: Exception) -> SampleError:
    """Classifies what broke a sample; an exception nobody named is `internal` and not retryable."""
    if isinstance(exception, RolloutFailure):
        return SampleError(kind=exception.kind, message=str(exception), retryable=exception.retryable)
    return SampleError(kind="internal", message=f"{type(exception).__name__}: {exception}", retryable=False)

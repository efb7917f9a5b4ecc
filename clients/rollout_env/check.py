"""Checks an environment against the rules that the service relies on, for the environment's own tests."""

from collections.abc import Callable, Sequence

from rollout_env.check_rules import Checker, Finding, Replies
from rollout_env.environment import TaskEnvironment
from rollout_env.play import Sample, run

ORDINARY_REPLIES = ("I do not know.", "Yes.", "42")


class CheckFailed(AssertionError):
    """The environment breaks rules. The message lists all findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        lines = ["The environment breaks rules of the service.", *(f"- {finding}" for finding in findings)]
        super().__init__("\n".join(lines))


def check(
    environment: TaskEnvironment | Callable[[], TaskEnvironment],
    replies: Replies = ORDINARY_REPLIES,
    samples: int | Sequence[Sample] = 3,
    *,
    seed: int = 0,
    repeatable: bool = True,
    max_block_s: float = 1.0,
    step_timeout_s: float = 120.0,
) -> None:
    """Raises `CheckFailed`, with all findings, if the environment breaks a rule that the service relies on.

    The rules, by their names in findings:

    - `attributes`: `description` is a text, `ExtraEnvInfo` a pydantic model with a JSON schema, `max_concurrent_steps`
      a positive number or None.
    - `example_samples`: the requested number of different samples, equal ones for an equal seed. For a large number:
      that many, each JSON with a prompt, and others for another seed.
    - `sample`: each is JSON with a prompt, and `ExtraEnvInfo` accepts its `extra_env_info`.
    - `start`, where there is one: does not raise, ends in time, and gives the same for the same sample.
    - `step`: does not raise, whatever the reply, and ends in time.
    - `outcome`: is a `StepOutcome` with permitted values: text, a known role, finite rewards, metadata that is JSON.
    - `metadata`: is accepted by `ExtraEnvInfo` unless the rollout ends.
    - `blocking`: a step does not keep the event loop from running other steps.
    - `state`: two rollouts that are played at once have the outcomes that they have one after the other.
    - `close`: does not raise.

    Args:
        environment: an instance, or a factory such as the class. With a factory, the steps of a rollout alternate
            between two instances, as between two replicas of the service. All instances are closed in the end.
        replies: played on each sample, one a turn; or a function that makes them for a sample. Some awkward replies,
            such as an empty one, are played too.
        samples: how many example samples to play, or the samples themselves.
        seed: seed of the example samples.
        repeatable: whether equal replies give equal outcomes. False skips the rule `state`.
        max_block_s: how long a step may block the event loop, in seconds.
        step_timeout_s: how long a step may take, in seconds.
    """
    if not callable(environment) and not isinstance(environment, TaskEnvironment):
        raise TypeError(f"check needs an environment or what makes one, such as its class; got {environment!r}.")
    instances = [environment] if isinstance(environment, TaskEnvironment) else [environment(), environment()]
    checker = Checker(instances, replies, max_block_s, step_timeout_s)
    if findings := run(checker.findings(samples, seed, repeatable)):
        raise CheckFailed(findings)

"""Metrics of the rollouts of one ingress replica.

Ray's exporters of all nodes hold these metrics, with `ray_` before each name. Serve tags each with the replica. Times
are in seconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from deployments.failures import RolloutFailure
from deployments.instruments import Instrument, SummedCounter, SummedHistogram
from rollout_client.contract.rollouts import SampleResult
from service.rollouts.episode import Episode
from service.rollouts.progress import RolloutObserver, Stage, Work
from service.scheduling.fair_queue import priority_name

SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000]
_REWARDS = [0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10, 100]
"""Upper bounds. The first bucket is for 0 and less."""
_CALLS = ("generate", "step", "agent")
"""The stages that are calls of another deployment."""
_VERSIONS = [0.5, 1, 2, 3, 4, 6, 8, 16, 32]


class RolloutMetrics(RolloutObserver):
    """Rollout metrics of one ingress replica."""

    def __init__(self) -> None:
        """Makes the instruments."""
        self._rollouts = SummedCounter("rollout_rollouts_total", "Rollouts that have ended.", ("task_name", "status"))
        self._turns = SummedCounter("rollout_turns_total", "Turns of rollouts that have ended.", ("task_name",))
        self._clipped_turns = SummedCounter(
            "rollout_clipped_turns_total",
            "Turns of rollouts that have ended whose response was cut by its length.",
            ("task_name",),
        )
        self._tokens = SummedCounter(
            "rollout_tokens_total",
            "Tokens of rollouts that have ended: generated, or of the environment.",
            ("task_name", "kind"),
        )
        self._tokens_by_priority = SummedCounter(
            "rollout_generated_tokens_by_priority_total",
            "Tokens of generations and calls that have ended, by the priority of their request.",
            ("priority",),
        )
        self._recomputed_tokens = SummedCounter(
            "rollout_recomputed_tokens_total",
            "Prompt tokens that an engine computed although an earlier turn of the rollout had, in whole blocks.",
            ("generator",),
        )
        self._failed_calls = SummedCounter(
            "rollout_failed_calls_total",
            "Generations, steps and runs of agents that failed; most were made again.",
            ("task_name", "stage", "kind"),
        )
        self._reward = SummedHistogram(
            "rollout_reward", "Total rewards of rollouts; those below 0 count as 0.", _REWARDS, ("task_name",)
        )
        # No counter falls.
        self._reward_sums = SummedCounter(
            "rollout_reward_sums_total",
            "Sums of the total rewards above 0 and below 0, without their sign.",
            ("task_name", "sign"),
        )
        self._staleness = SummedHistogram(
            "rollout_staleness_versions",
            "Versions that the oldest token of a rollout is behind when it ends.",
            _VERSIONS,
            ("task_name",),
        )
        self._stages = SummedHistogram(
            "rollout_stage_seconds", "Time of a stage of a rollout.", SECONDS, ("task_name", "stage")
        )
        self._work = SummedHistogram(
            "rollout_work_seconds",
            "Time of a generation's turn in the queue, of a request's prompts, of a result's encoding.",
            SECONDS,
            ("work",),
        )
        self.instruments: tuple[Instrument, ...] = tuple(vars(self).values())
        """All of the above, to flush."""

    @contextmanager
    def during(self, stage: Stage, episode: Episode) -> Iterator[None]:
        began, task_name = monotonic(), episode.identity.task_name
        try:
            yield
        except BaseException as error:
            # Times are those of stages that no exception has ended.
            if isinstance(error, RolloutFailure) and stage in _CALLS:
                self._failed_calls.add(1, task_name, stage, error.kind)
            raise
        self._stages.observe(monotonic() - began, task_name, stage)

    def took(self, work: Work, seconds: float) -> None:
        self._work.observe(seconds, work)

    def generated(self, weight: float, tokens: int) -> None:
        self._tokens_by_priority.add(tokens, priority_name(weight))

    def recomputed(self, generator: str, tokens: int) -> None:
        self._recomputed_tokens.add(tokens, generator)

    def ended(self, result: SampleResult, staleness: int | None) -> None:
        task_name, metrics = result.task_name, result.metrics
        self._rollouts.add(1, task_name, result.status)
        self._turns.add(metrics.turn_count, task_name)
        self._clipped_turns.add(metrics.clipped_turns, task_name)
        self._tokens.add(metrics.assistant_tokens, task_name, "generated")
        self._tokens.add(metrics.env_tokens, task_name, "environment")
        if result.total_reward is not None:
            self._reward.observe(max(result.total_reward, 0.0), task_name)
            sign = "negative" if result.total_reward < 0 else "positive"
            self._reward_sums.add(abs(result.total_reward), task_name, sign)
        if staleness is not None:
            self._staleness.observe(staleness, task_name)

"""The metrics of one sample. A new metric per sample is a field of the contract's `SampleMetrics`, filled here."""

from collections.abc import Mapping

from rollout_client.contract import FinishReason, SampleMetrics, SampleStatus
from service.rollouts.progress import MetricCounts

UNNAMED_REWARD = "reward"
"""The name of a reward that its environment gave as a single number."""


class SampleMetricsAccumulator:
    """Counts the tokens of one episode while it is played. Lengths are in tokens."""

    def __init__(self) -> None:
        self._turn_input_tokens: list[int] = []
        self._turn_gen_tokens: list[int] = []
        self._env_tokens = 0
        self._parse_errors = 0
        self._environment: dict[str, float] = {}
        self._clipped_turns = 0
        self.tokens_by_replica: dict[str, int] = {}
        """Generated ones, without those of replicas that are not known."""

    def add_generation(self, input_tokens: int, generated_tokens: int) -> None:
        self._turn_input_tokens.append(input_tokens)
        self._turn_gen_tokens.append(generated_tokens)

    def extend_generation(self, generated_tokens: int) -> None:
        """The last generation went on after it was interrupted."""
        self._turn_gen_tokens[-1] += generated_tokens

    def end_generation(self, finish_reason: FinishReason | None) -> None:
        """The last generation is whole, or it was interrupted, which is no reason."""
        self._clipped_turns += finish_reason == "length"

    def add_tokens_of(self, replica: str, generated_tokens: int) -> None:
        """The replica has generated so many of the tokens."""
        if replica:
            self.tokens_by_replica[replica] = self.tokens_by_replica.get(replica, 0) + generated_tokens

    def add_parse_error(self) -> None:
        self._parse_errors += 1

    def add_environment_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._environment[name] = self._environment.get(name, 0.0) + value

    def add_observation(self, tokens: int) -> None:
        self._env_tokens += tokens

    def counts(self) -> MetricCounts:
        return MetricCounts(
            self._turn_input_tokens.copy(),
            self._turn_gen_tokens.copy(),
            self._env_tokens,
            self._parse_errors,
            self._environment.copy(),
            self._clipped_turns,
            self.tokens_by_replica.copy(),
        )

    def restore(self, counts: MetricCounts) -> None:
        self._turn_input_tokens = counts.turn_input_tokens.copy()
        self._turn_gen_tokens = counts.turn_gen_tokens.copy()
        self._env_tokens = counts.env_tokens
        self._parse_errors = counts.parse_errors
        self._environment = counts.environment.copy()
        self._clipped_turns = counts.clipped_turns
        self.tokens_by_replica = counts.tokens_by_replica.copy()

    def metrics(
        self, status: SampleStatus | None, terminated: bool, truncated: bool, total_reward: float | None
    ) -> SampleMetrics:
        """Counts only what was played here, not the turns of a message log that was posted."""
        assistant_tokens = sum(self._turn_gen_tokens)
        metrics = SampleMetrics.model_construct(
            turn_count=len(self._turn_gen_tokens),
            total_tokens=assistant_tokens + self._env_tokens,
            assistant_tokens=assistant_tokens,
            env_tokens=self._env_tokens,
            terminated=terminated,
            truncated=truncated,
            max_turns_reached=status == "max_turns",
            total_reward=total_reward,
            turn_gen_tokens=self._turn_gen_tokens.copy(),
            turn_input_tokens=self._turn_input_tokens.copy(),
        )
        if self._parse_errors:
            metrics.parse_errors = self._parse_errors
        if self._clipped_turns:
            metrics.clipped_turns = self._clipped_turns
        if self._environment:
            metrics.environment = self._environment.copy()
        return metrics

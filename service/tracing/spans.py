"""Spans of the first rollouts of a request, of their turns, generations, steps and runs of agents, below its own."""

from contextlib import AbstractContextManager, ExitStack
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, Tracer

from deployments.traces import PROPAGATOR
from rollout_client.contract import SampleResult
from service.rollouts.episode import Episode
from service.rollouts.observer import RolloutObserver, Stage, Work


class TracedRollouts(RolloutObserver):
    """Also tells another observer all that it is told."""

    def __init__(self, tracer: Tracer, other: RolloutObserver, rollouts_per_request: int | None = None) -> None:
        """Args: `rollouts_per_request` is that of `TracingSettings`."""
        self._tracer = tracer
        self._other = other
        self._rollouts_per_request = rollouts_per_request
        self._begun: WeakKeyDictionary[Span, int] = WeakKeyDictionary()
        """Rollouts by the span of their request."""

    def during(self, stage: Stage, episode: Episode) -> AbstractContextManager[object]:
        observed = self._other.during(stage, episode)
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            # A span that is not recorded costs as much time as one that is.
            return observed
        both = ExitStack()
        both.enter_context(observed)
        if stage == "rollout" and self._has_enough():
            # Nothing below it is sampled then.
            both.enter_context(trace.use_span(INVALID_SPAN))
            return both
        identity = episode.identity
        attributes: dict[str, str | int] = {"rollout.task_name": identity.task_name}
        if stage == "rollout":
            attributes |= {
                "rollout.id": identity.rollout_id,
                "rollout.sample": identity.idx,
                "rollout.generation_index": identity.generation_index,
            }
        both.enter_context(self._tracer.start_as_current_span(stage, attributes=attributes))
        return both

    def _has_enough(self) -> bool:
        """Whether the request has as many rollouts with spans as it may; if not, one begins."""
        request = trace.get_current_span()
        begun = self._begun.get(request, 0)
        if begun == self._rollouts_per_request:
            return True
        self._begun[request] = begun + 1
        return False

    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        if trace.get_current_span().get_span_context().trace_flags.sampled:
            PROPAGATOR.inject(carrier)
        return carrier.get("traceparent", "")

    def took(self, work: Work, seconds: float) -> None:
        self._other.took(work, seconds)

    def ended(self, result: SampleResult, staleness: int | None) -> None:
        self._other.ended(result, staleness)

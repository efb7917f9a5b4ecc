"""Weight versions of a generation: which ones a request demands, and which ones made the tokens of a response.

No I/O.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from deployments.failures import OtherVersionLoaded, RolloutFailure, TokensTooOld
from deployments.protocols.generation import GenerationRequest


def refuse_other_version(request: GenerationRequest, loaded: int | None) -> None:
    """Refuses a generation that the weights of version `loaded` must not make.

    Args:
        loaded: of the policy that the request names; `None` if the replica does not have that policy.

    Raises:
        OtherVersionLoaded: they are older than `min_weight_version`, are not `weight_version`, or there are none of
            this policy.
        TokensTooOld: they are more than `max_staleness` versions ahead of `oldest_version`.
    """
    if loaded is None:
        raise OtherVersionLoaded(f"The generator replica does not have the policy {request.policy}.")
    if loaded < request.min_weight_version:
        raise OtherVersionLoaded(
            f"The generator replica has version {loaded}, and is not at version {request.min_weight_version} yet."
        )
    if request.weight_version not in (None, loaded):
        raise OtherVersionLoaded(
            f"The generator replica has version {loaded} and not version {request.weight_version}, which must generate "
            "every token of the rollout."
        )
    if request.max_staleness is not None and request.oldest_version is not None:
        staleness = loaded - request.oldest_version
        if staleness > request.max_staleness:
            raise TokensTooOld(
                f"The conversation has tokens of version {request.oldest_version}, which is {staleness} versions "
                f"behind version {loaded}; policy.max_staleness allows {request.max_staleness}. Begin another one."
            )


@dataclass(frozen=True, slots=True)
class RollingActivation:
    """A moment of an update in which replicas change to full weights, or an adapter without a name, one by one."""

    before: int
    """The version of the replicas that have not changed yet."""
    version: int
    replicas: frozenset[str]
    """Those that have it."""

    def admits(self, replica: str, request: GenerationRequest) -> bool:
        """Whether the replica may make the generation. Named policies are served over the weights from before."""
        if request.policy is not None:
            return replica not in self.replicas
        try:
            refuse_other_version(request, self.version if replica in self.replicas else self.before)
        except RolloutFailure:
            return False
        return True


@dataclass(frozen=True, slots=True)
class CurrentVersions:
    """A store's answer at one moment: answers can overtake one another, and a later one has a higher `revision`."""

    store: str
    """Differs between any two stores, one that restarted included."""
    revision: int
    versions: Mapping[str, int] = field(default_factory=dict)
    """By name, of the policies that are served; that of the policy without a name is under ''."""
    rolling: RollingActivation | None = None
    """The rolling activation under way; `None` without one."""

    def is_older_than(self, other: "CurrentVersions") -> bool:
        return self.store == other.store and self.revision < other.revision


class _VersionSpan(Protocol):
    """Tokens `[start, end)` were sampled with the weights of `version`."""

    @property
    def version(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


Span = TypeVar("Span", bound=_VersionSpan)


def joined_spans(
    first: Iterable[Span], second: Iterable[_VersionSpan], shift: int, span_of: Callable[[str, int, int], Span]
) -> list[Span]:
    """The spans of both parts; one that goes on with the version of the span before it is one span with that.

    Args:
        shift: tokens before the second part.
        span_of: makes a span of version, start and end.
    """
    joined = list(first)
    for span in second:
        start, end = span.start + shift, span.end + shift
        if joined and joined[-1].version == span.version and joined[-1].end == start:
            start = joined.pop().start
        joined.append(span_of(span.version, start, end))
    return joined

"""Which versions of the weights may generate the tokens of a rollout. A state machine: no I/O.

The staleness of a rollout is the number of the current version less that of the oldest version that generated one of
its tokens. Where the numbers of versions skip, it counts the skipped ones too. The versions are those of the policy
that the request names; tokens of other policies, in a message log that was posted, have no part in it.

Guarantees: a rollout that has ended by itself has a staleness of at most `max_staleness` at its end; a rollout without
a generated token is never stale; where `version` is demanded, a rollout takes no token of another one; the current
version never goes back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.failures import GenerationLost, PolicyDropped, VersionReplaced
from deployments.protocols.generation import Generation, WeightSpan
from rollout_client.contract.base import label_of, read_label
from rollout_client.contract.messages import Message, WeightVersionSpan
from service.rollouts.messages import first_tokens

OnVersion = Callable[[int | None], None]
"""Called with the version that has become current; with `None` when a named policy has no version any more."""


class VersionFeed(Protocol):
    """Tells which version is current. `RemotePolicy` (`service/remote/policy.py`) implements it."""

    def subscribe(self, on_version: OnVersion, policy: str | None = None) -> Callable[[], None]:
        """Calls `on_version` with the current version, at once if that is known, and with each one that follows.

        Args:
            policy: the named policy whose versions are told; by default the one without a name.

        Returns a function that ends the subscription.
        """
        ...


@dataclass(slots=True, eq=False)
class VersionBounds:
    """The demands of a request on the versions of its tokens, and the current version; shared by its rollouts."""

    version: int | None = None
    """The version that generates every token; `None` for any."""
    max_staleness: int | None = None
    """Largest staleness of a rollout; `None` for any."""
    current: int | None = None
    """`None` while it is not known."""
    policy: str | None = None
    """The named policy whose versions are meant; `None` for the one without a name."""
    is_dropped: bool = False
    """Whether the named policy has no version any more."""

    @property
    def is_any(self) -> bool:
        """Whether every version will do."""
        return self.version is None and self.max_staleness is None

    def note_current(self, version: int | None) -> int | None:
        """Records that a version has become current, or that the named policy was dropped.

        Returns the version before; `None` if that is not known, or is current still.
        """
        self.is_dropped = version is None
        if version is None:
            return None
        before = self.current
        if before is not None and version <= before:
            return None
        self.current = version
        return before

    def allows(self, oldest: int | None) -> bool:
        """Whether a rollout whose oldest token is of this version may go on; `None` for a rollout without tokens."""
        if self.max_staleness is None or self.current is None or oldest is None:
            return True
        return self.current - oldest <= self.max_staleness


class RolloutVersions:
    """The versions that generated the tokens of one rollout, those of the message log that was posted included."""

    __slots__ = ("_oldest", "_oldest_under_way", "at_end", "bounds")

    def __init__(self, bounds: VersionBounds, oldest: int | None = None) -> None:
        """Begins with `oldest`, the oldest version that generated a token of the posted message log."""
        self.bounds = bounds
        self._oldest = oldest
        self._oldest_under_way: int | None = None
        """No token of the generation under way is of an older version; `None` while that is not known."""
        self.at_end: int | None = None
        """The staleness at the end of the rollout; `None` without tokens, or if it is not known."""

    @property
    def is_stale(self) -> bool:
        return not self.bounds.allows(self._oldest)

    def begin_generation(self) -> None:
        """Records that a generation begins, of whose tokens nothing is known.

        Raises:
            VersionReplaced: the version that must generate them is not current any more.
            PolicyDropped: the policy that must generate them has no version any more.
        """
        refuse_dropped(self.bounds.policy, self.bounds.is_dropped)
        self._oldest_under_way = None
        demanded, current = self.bounds.version, self.bounds.current
        if demanded is not None and current is not None and current > demanded:
            raise VersionReplaced(
                f"Version {demanded} must generate every token of the rollout, and version {current} took its place "
                "before the rollout had ended. Demand another version, or push new weights when rollouts have ended."
            )

    def demanded_part(self, generation: Generation) -> Generation:
        """The generation up to its first token that another version than the demanded one has generated.

        If there is such a token, the generation counts as interrupted there.

        Raises:
            GenerationLost: a version is demanded, and the engine does not say which one has generated the tokens.
        """
        if self.bounds.version is None:
            return generation
        if generation.token_ids and not generation.weight_versions:
            raise GenerationLost("The engine did not say which version of the weights has generated its tokens.")
        demanded = label_of(self.bounds.policy, self.bounds.version)
        kept = _tokens_of_version(generation.weight_versions, demanded)
        return generation if kept >= len(generation.token_ids) else first_tokens(generation, kept)

    def add(self, spans: Iterable[WeightSpan]) -> None:
        """Records tokens of these versions as the rollout's."""
        for span in spans:
            version = read_label(span.version).number
            if self._oldest is None or version < self._oldest:
                self._oldest = version

    def must_interrupt(self, before: int, is_at_replica: bool) -> bool:
        """Whether a new current version makes it necessary to have the tokens that are being generated at once.

        That is so if they may be stale, which only the tokens themselves can tell, or if the version that must generate
        them is not current any more.

        Args:
            before: the version that was current before.
            is_at_replica: whether a generation is at a replica, none of which has an older version than `before`.
        """
        bounds = self.bounds
        if bounds.version is not None and bounds.current is not None and bounds.current > bounds.version:
            return True
        if not is_at_replica:
            return False
        if self._oldest_under_way is None:
            self._oldest_under_way = before
        return not bounds.allows(self._oldest_under_way)

    def restore(self, spans: Iterable[WeightVersionSpan], at_end: int | None) -> None:
        """Tokens of these versions belong to the rollout, which ended before with this staleness if it has ended."""
        self.add(WeightSpan(span.version, span.start, span.end) for span in spans)
        self.at_end = at_end

    def note_end(self) -> None:
        """Records the end of the rollout."""
        if self.at_end is None and self._oldest is not None and self.bounds.current is not None:
            # Replicas have a version shortly before it is called current.
            self.at_end = max(self.bounds.current - self._oldest, 0)


def _tokens_of_version(spans: Iterable[WeightSpan], version: str) -> int:
    """How many tokens this version has generated, from the first token of a generation on."""
    tokens = 0
    for span in spans:
        if span.version != version or span.start != tokens:
            break
        tokens = span.end
    return tokens


def oldest_version(messages: Sequence[Message], policy: str | None = None) -> int | None:
    """The oldest version of the policy that generated a token of these messages; `None` if none is known."""
    generated = (message for message in messages if message.generation_logprobs is not None)
    labels = (read_label(span.version) for message in generated for span in message.weight_versions or ())
    return min((label.number for label in labels if label.name == policy), default=None)


def refuse_dropped(policy: str | None, is_dropped: bool) -> None:
    """Raises `PolicyDropped` if the named policy has no version any more."""
    if is_dropped:
        raise PolicyDropped(
            f"The policy {policy} was dropped, or other full weights took the place of those that it is an "
            "adapter for. Push an adapter for the current ones, and post the sample again."
        )

"""Which version of each named policy is current, as the policy store tells everyone. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NamedVersions:
    """What one store said at one moment: answers can overtake one another, and a later one has a higher `revision`."""

    store: str
    """Differs between any two stores, one that restarted included."""
    revision: int
    versions: Mapping[str, int] = field(default_factory=dict)
    """By name, of the policies that are served."""

    def is_older_than(self, other: "NamedVersions") -> bool:
        return self.store == other.store and self.revision < other.revision

"""Which ingress replicas live, as far as the job store has heard. A state machine: no I/O, no clock."""

from collections.abc import Iterable


class Leases:
    """An owner that was not heard of for `lease_s` seconds is lost. Times are seconds of any one clock.

    A store that starts anew has heard of nobody: it calls `heard` for each owner that it finds, so that the time in
    which it was away counts against none.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard_at: dict[str, float] = {}

    def heard(self, owner: str, now: float) -> None:
        self._heard_at[owner] = max(now, self._heard_at.get(owner, now))

    def heard_at(self, owner: str) -> float:
        """When the owner was heard of last; 0 if it never was."""
        return self._heard_at.get(owner, 0.0)

    def lost(self, now: float) -> list[str]:
        """Owners whose lease has run out."""
        return [owner for owner, heard_at in self._heard_at.items() if now - heard_at > self._lease_s]

    def forget(self, owners: Iterable[str]) -> None:
        """These owners have no jobs. One that is heard of again is known again."""
        for owner in owners:
            self._heard_at.pop(owner, None)

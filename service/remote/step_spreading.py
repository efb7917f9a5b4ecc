"""Which replica of an environment steps a rollout next. No I/O, no Ray."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

AVOIDED_S = 10.0
"""Time for which a replica that lost a step gets none while there are others."""


class StepSpreading:
    """Gives each step to a replica with the fewest steps of this ingress replica.

    Guarantees: the loads of replicas that were equally busy differ by at most one; a replica that lost a step gets none
    for `AVOIDED_S` while there is another, unless it answers before; the steps of one turn of a request in lockstep are
    given to one replica while it lives; the steps of one session are given to one replica until the session is released
    or that replica is gone. A session counts as one step until it is released, whether a step of it runs or not.
    """

    def __init__(self, choose: random.Random | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins without steps; `choose` breaks ties at random, so that ingress replicas do not all begin alike."""
        self._choose = choose or random.Random()
        self._clock = clock
        self._own: Counter[str] = Counter()
        """Steps of this ingress replica that have no result yet."""
        self._avoided_until: dict[str, float] = {}
        self._lockstep: dict[str, tuple[str, int]] = {}
        """The replica that has the steps of one turn of a request in lockstep, and how many have not ended."""
        self._sessions: dict[str, str] = {}
        """The replica of each session."""

    def begin(self, replicas: Sequence[str], lockstep_id: str = "") -> str | None:
        """Gives a step to one of `replicas` with the least load, and returns which; `None` if there are none.

        Args:
            lockstep_id: steps with the same one, unless empty, are given to the same replica until all have ended.
        """
        known, steps = self._lockstep.get(lockstep_id, (None, 0))
        replica = known if known in replicas else self._least_loaded(replicas)
        if replica is None:
            return None
        self._own[replica] += 1
        if lockstep_id:
            self._lockstep[lockstep_id] = replica, steps + 1
        return replica

    def end(self, replica: str, lockstep_id: str = "") -> None:
        """Records that a step that `begin` gave to the replica has ended, in whatever way."""
        self._own[replica] -= 1
        if not self._own[replica]:
            del self._own[replica]
        if lockstep_id:
            known, steps = self._lockstep.pop(lockstep_id)
            if steps > 1:
                self._lockstep[lockstep_id] = known, steps - 1

    def begin_in_session(self, replicas: Sequence[str], session_id: str) -> str | None:
        """Gives a step of a session to the replica that has the session; to one of `replicas` with the least load, if
        none of them has it, which has it from then on. Returns which; `None` if there are no replicas."""
        replica = self._sessions.get(session_id)
        if replica is not None and replica in replicas:
            return replica
        self.release(session_id)
        replica = self._least_loaded(replicas)
        if replica is not None:
            self._sessions[session_id] = replica
            self._own[replica] += 1
        return replica

    def release(self, session_id: str) -> str | None:
        """Forgets the session. Returns the replica that had it, if any."""
        replica = self._sessions.pop(session_id, None)
        if replica is not None:
            self.end(replica)
        return replica

    def note_answer(self, replica: str) -> None:
        """Records that the replica has answered: it is not avoided any longer."""
        self._avoided_until.pop(replica, None)

    def mark_failed(self, replica: str) -> None:
        """Avoids a replica that lost a step for a while."""
        self._avoided_until[replica] = self._clock() + AVOIDED_S

    def forget_all_but(self, replicas: Sequence[str]) -> None:
        """Forgets which replicas that are gone were avoided."""
        self._avoided_until = {name: until for name, until in self._avoided_until.items() if name in replicas}

    def _least_loaded(self, replicas: Sequence[str]) -> str | None:
        candidates = self._not_avoided(replicas)
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        least = min(self._own[replica] for replica in candidates)
        return self._choose.choice([replica for replica in candidates if self._own[replica] == least])

    def _not_avoided(self, replicas: Sequence[str]) -> Sequence[str]:
        if not self._avoided_until:
            return replicas
        now = self._clock()
        return [replica for replica in replicas if self._avoided_until.get(replica, now) <= now] or replicas

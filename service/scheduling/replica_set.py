"""The generator replicas that one ingress replica knows: their windows, and which versions they have. No I/O, no Ray.

Guarantee: a replica that is listed again still counts the generations that it had when it was not.
"""

from collections.abc import Collection

from deployments.protocols.generation import GenerationRequest
from deployments.protocols.weight_versions import RollingActivation
from service.scheduling.replica_queues import UNKNOWN_REPLICA
from service.scheduling.replica_window import EngineCapacity, ReplicaWindow

SUSPECT_LOAD = 1_000_000
"""Load that is assumed of a suspect replica, whose last calls failed: new rollouts go there only if all replicas are
suspect, or to try it."""


class ReplicaSet:
    """The replicas that take calls; `UNKNOWN_REPLICA` while none is listed."""

    def __init__(self, window_factor: float | None) -> None:
        self.capacity = EngineCapacity()
        self._window_factor = window_factor
        self.windows = {UNKNOWN_REPLICA: ReplicaWindow(self.capacity, window_factor)}
        self._windows_of_gone: dict[str, ReplicaWindow] = {}
        """Windows of replicas that are not listed any more: one that is listed again may still run generations."""
        self.load_of_others: dict[str, int] = {}
        """Generations that count as load of a replica beside those of this ingress."""
        self.rolling: RollingActivation | None = None
        """Which replicas have which version, while they change one by one."""

    @property
    def has_suspects(self) -> bool:
        return any(window.is_suspect for window in self.windows.values())

    @property
    def are_all_suspect(self) -> bool:
        return all(window.is_suspect for window in self.windows.values())

    def admits(self, replica: str, request: GenerationRequest) -> bool:
        """Whether the replica is one that the request accepts, and has such a version, as far as known."""
        if request.replica not in ("", replica):
            return False
        return self.rolling is None or self.rolling.admits(replica, request)

    def admitting(self, request: GenerationRequest) -> Collection[str]:
        """Those with such a version. Where none has it, each refuses; the rollout learns from that how it goes on.

        For a request that names a replica: that one, or all if it is gone; its caller does not send it elsewhere.
        """
        if request.replica in self.windows:
            return (request.replica,)
        if self.rolling is None:
            return self.windows
        return [replica for replica in self.windows if self.admits(replica, request)] or self.windows

    def resize(self, capacity: EngineCapacity) -> None:
        self.capacity = capacity
        for window in self.windows.values():
            window.resize(capacity)

    def list_anew(self, replicas: Collection[str]) -> Collection[str]:
        """Sets the replicas that take calls; returns those that did before."""
        names = replicas or (UNKNOWN_REPLICA,)
        gone = self.windows.keys() - names
        for replica in names:
            if replica not in self.windows:
                window = self._windows_of_gone.pop(replica, None) or ReplicaWindow(self.capacity, self._window_factor)
                window.resize(self.capacity)
                self.windows[replica] = window
                self.note_load(replica, window)
        for replica in gone:
            window = self.windows.pop(replica)
            if window.generations:
                self._windows_of_gone[replica] = window
            self.load_of_others.pop(replica, None)
        return gone

    def is_listed(self, replica: str, window: ReplicaWindow) -> bool:
        """Whether the window is that of a replica that takes calls. Forgets that of another one if it is empty."""
        if self.windows.get(replica) is window:
            return True
        if not window.generations:
            self._windows_of_gone.pop(replica, None)
        return False

    def note_load(self, replica: str, window: ReplicaWindow) -> None:
        if window.of_others or window.is_suspect:
            self.load_of_others[replica] = window.of_others + (SUSPECT_LOAD if window.is_suspect else 0)
        else:
            self.load_of_others.pop(replica, None)

"""Tells a replica that an ingress replica has died while it had work done here.

Serve's calls reach a replica as tasks of Ray's, which go on after the end of the process that has made them.

Guarantee: what a caller that is dead has under way is given up every `POLL_S` seconds until it has ended. Whether one
lives is asked only of callers with work here.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.context import _get_internal_replica_context

POLL_S = 0.25


def own_name() -> str:
    """How this process names itself to the replicas that it calls, so that these can tell whether it lives."""
    context = _get_internal_replica_context()  # type: ignore[no-untyped-call]
    return uuid4().hex if context is None else str(context.replica_id.to_full_id_str())


def has_died(caller: str) -> bool:
    """Whether the actor of the caller, a replica of Serve, is gone. Ray tells each process of that within milliseconds.

    Blocks while Ray's control service does not answer.
    """
    try:
        ray.get_actor(caller, namespace=SERVE_NAMESPACE)
    except ValueError:
        return True
    except RayError:
        # Nobody knows.
        return False
    return False


class CallerWatch:
    def __init__(self, give_up: Callable[[Sequence[str]], None]) -> None:
        """Args: `give_up` ends work of these ids, which nobody waits for. It may be called again for the same work."""
        self._give_up = give_up
        self._work: dict[str, dict[object, Sequence[str]]] = {}
        """The ids of what is under way, by caller and by call."""
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def working(self, caller: str, ids: Sequence[str]) -> Iterator[None]:
        """For the length of the block this is under way for the caller, which is watched if it is a replica."""
        if not ReplicaID.is_full_id_str(caller):
            yield
            return
        call = object()
        self._work.setdefault(caller, {})[call] = ids
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._work[caller][call]
            if not self._work[caller]:
                del self._work[caller]

    async def _watch(self) -> None:
        while self._work:
            await asyncio.sleep(POLL_S)
            for caller in list(self._work):
                if await asyncio.to_thread(has_died, caller):
                    self._give_up(list(chain.from_iterable(self._work.get(caller, {}).values())))
        self._watching = None

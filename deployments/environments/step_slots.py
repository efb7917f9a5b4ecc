"""Which steps of a replica run, and which wait."""

import asyncio
from collections import OrderedDict, deque


class StepSlots:
    """At most `limit` steps hold a slot at once.

    Guarantees: while steps wait, every slot is held; requests take turns, so a request of one step does not wait for
    all steps of a large one; the steps of one request get their slots in the order in which they came; a step that is
    cancelled while it waits takes no slot.
    """

    def __init__(self, limit: int | None) -> None:
        """Args: `limit` is None for no limit."""
        self._free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By request, the one whose turn comes next first."""

    @property
    def is_full(self) -> bool:
        """Whether a step would have to wait for its slot."""
        return self._free == 0

    async def acquire(self, request_id: str) -> None:
        """Returns when a step of the request has a slot, which the caller must release."""
        if self._free is None:
            return
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # The slot was given in the same iteration of the event loop.
                self.release()
            raise

    def release(self) -> None:
        """Gives the slot of a step to the step whose turn it is."""
        if self._free is None:
            return
        while self._waiting:
            request_id, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[request_id] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1

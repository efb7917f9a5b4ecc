"""The calls of a generator replica: batches of generations, answered as they finish, and what is given up."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from deployments.failures import GenerationLost, RolloutFailure
from deployments.protocols import Generation, GenerationRequest
from deployments.rpc.batching import BatchResults, results_as_completed


class GenerationCalls:
    """Runs generations by `generate`; of each it knows which task it is, so that one of many can be aborted."""

    def __init__(self, generate: Callable[[GenerationRequest], Awaitable[Generation]]) -> None:
        self._generate = generate
        self._running: dict[str, asyncio.Task[object]] = {}

    def answers(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[BatchResults[Generation], None]:
        """Yields each generation, or what broke it, in batches as they finish."""
        aborted = GenerationLost("The generation was aborted.")
        return results_as_completed([self._generation_or_failure(request) for request in requests], aborted)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends those that still run; the others have ended already."""
        for request_id in request_ids:
            if (task := self._running.get(request_id)) is not None:
                task.cancel()

    async def _generation_or_failure(self, request: GenerationRequest) -> Generation | RolloutFailure:
        task = asyncio.current_task()
        assert task is not None
        self._running[request.request_id] = task
        try:
            return await self._generate(request)
        except RolloutFailure as failure:
            return failure
        except Exception as error:  # noqa: BLE001 - its class may not exist where this is read
            return RolloutFailure(f"{type(error).__name__}: {error}")
        finally:
            # A later try of the same generation may have taken the place.
            if self._running.get(request.request_id) is task:
                del self._running[request.request_id]

"""Calls of other deployments over Serve handles, what breaks them named."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from grpc import RpcError
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from deployments.failures import RolloutFailure


async def call_result(awaited: Awaitable[Any], call: Any, lost: type[RolloutFailure], who: str) -> Any:
    """Awaits an answer of a handle call and names what broke it; cancelling the wait cancels the call.

    Raises:
        RolloutFailure: `lost` if the replica or the way to it broke.
        Exception: what the replica itself raised, as it raised it.
    """
    try:
        return await awaited
    except asyncio.CancelledError:
        call.cancel()
        raise
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise lost(f"{who} gave the call up.") from error
    except RayActorError as error:
        raise lost(f"{who} died during the call.") from error
    except (RayError, RayServeException, RpcError) as error:
        raise lost(f"{who} could not be reached: {error}") from error

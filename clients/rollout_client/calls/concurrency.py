"""The functions that differ between the async half of the client and the sync half that is generated from it.

`clients/generate_sync.py` replaces each `async_` name by its twin.
"""

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

async_sleep = asyncio.sleep
sleep = time.sleep
async_cancelled = asyncio.CancelledError
"""The exception that ends a call from outside."""
cancelled = KeyboardInterrupt
async_call_blocking = asyncio.to_thread
"""Runs a function that blocks, so that the other tasks of the event loop go on meanwhile."""


def call_blocking(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    return function(*args, **kwargs)

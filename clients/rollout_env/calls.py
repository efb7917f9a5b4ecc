"""Calls a method of an environment, plain or async, without blocking the event loop.

A plain method runs in a thread of its own: a pool would be exhausted by calls that hang, and the process would wait for
them when it ends.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
_abandoned: set[threading.Thread] = set()
"""Threads whose callers have stopped waiting. Some have ended since."""


def abandoned_threads() -> int:
    """Number of threads that still run a call whose caller has stopped waiting, for example after a timeout."""
    ended = {thread for thread in _abandoned if not thread.is_alive()}
    _abandoned.difference_update(ended)
    return len(_abandoned)


def is_plain(function: Callable[..., Any]) -> bool:
    return not inspect.iscoroutinefunction(function)


async def call(function: Callable[..., Result | Awaitable[Result]], *args: Any) -> Result:
    """Calls a plain or async function. If this is cancelled, a plain function runs on and its result is dropped."""
    result = await in_thread(function, *args) if is_plain(function) else function(*args)
    # A function that is async but does not look so, such as a decorated one, runs in the event loop like any other.
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Calls the function in a new thread, in the context of the caller."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = context.run(function, *args)
        except StopIteration as stop:
            error = RuntimeError("The function raised StopIteration.")  # A future cannot hold that.
            error.__cause__ = stop
        except BaseException as raised:  # noqa: BLE001 - whatever it is goes to the caller
            error = raised
        try:
            loop.call_soon_threadsafe(settle, future, result, error)
        except RuntimeError:
            return  # The loop has ended: there is no caller.

    name = f"call of {getattr(function, '__qualname__', function)}"
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        _abandoned.add(thread)
        raise


def settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

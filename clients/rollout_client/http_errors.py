"""What httpx raises, as errors of the client. No I/O."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from rollout_client.deadline import Deadline
from rollout_client.errors import ServiceUnreachable, StreamBroken


@contextmanager
def before_the_response(url: str, deadline: Deadline) -> Iterator[None]:
    """Around sending a request, until the headers of its response have arrived."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ServiceUnreachable(f"{url} does not answer: connecting timed out.", may_have_arrived=False) from error
    except httpx.TimeoutException as error:
        raise deadline.error() from error
    except httpx.RequestError as error:
        may_have_arrived = not isinstance(error, httpx.ConnectError)
        raise ServiceUnreachable(f"{url} cannot be reached: {error}", may_have_arrived) from error


@contextmanager
def during_the_response(deadline: Deadline) -> Iterator[None]:
    """Around reading the body of a response."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise deadline.error() from error
    except httpx.RequestError as error:
        raise StreamBroken(f"The response broke off: {error}") from error

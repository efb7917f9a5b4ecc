"""Short limits of time, so that a test is quick, which a busy machine may pass before anything has begun."""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
LIMITS_S = (0.4, 4.0, 40.0)


def in_the_middle(attempt: Callable[[float], Result], has_begun: Callable[[Result], bool]) -> Result:
    """The result of an attempt that its limit in seconds cuts off after it has begun: that of the last one, if none is.

    What is asserted of the result holds or fails on a machine of any speed; what the speed decides is how many attempts
    it takes.
    """
    result = attempt(LIMITS_S[0])
    for limit_s in LIMITS_S[1:]:
        if has_begun(result):
            break
        result = attempt(limit_s)
    return result

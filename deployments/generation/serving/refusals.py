"""The service's own failures as exceptions that vLLM's servers answer with a status."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from deployments.failures import (
    EnvironmentRejected,
    GenerationRejected,
    OtherVersionLoaded,
    Overloaded,
    PromptRejected,
    RolloutFailure,
    StoreFailure,
    TokensTooOld,
    VersionReplaced,
)

_STATUSES: dict[type[RolloutFailure], HTTPStatus] = {
    PromptRejected: HTTPStatus.BAD_REQUEST,
    # The chat template refuses the role of a message.
    EnvironmentRejected: HTTPStatus.BAD_REQUEST,
    GenerationRejected: HTTPStatus.BAD_REQUEST,
    OtherVersionLoaded: HTTPStatus.CONFLICT,
    VersionReplaced: HTTPStatus.CONFLICT,
    TokensTooOld: HTTPStatus.CONFLICT,
    Overloaded: HTTPStatus.TOO_MANY_REQUESTS,
}


def refusal_of(failure: RolloutFailure | StoreFailure) -> GracefulHTTPError:
    if isinstance(failure, StoreFailure):
        return GracefulHTTPError(str(failure), HTTPStatus(failure.status))
    status = next((status for kind, status in _STATUSES.items() if isinstance(failure, kind)), None)
    return GracefulHTTPError(str(failure), status or HTTPStatus.SERVICE_UNAVAILABLE)


@contextmanager
def answered_failures() -> Iterator[None]:
    """Raises the failures of the block as vLLM's servers answer with them."""
    try:
        yield
    except (RolloutFailure, StoreFailure) as failure:
        raise refusal_of(failure) from failure

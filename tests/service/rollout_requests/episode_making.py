"""The episodes of a whole request, as the service makes them: checked, then made."""

from collections.abc import Mapping

from deployments.failures import RolloutFailure
from rollout_client.contract.rollouts import RolloutRequest
from service.rollout_requests.episodes import EpisodeFactory, ValidRequest
from service.rollout_requests.sample_preparation import TaskDescriptions
from service.rollouts.episode import Episode


def made_episodes(
    factory: EpisodeFactory,
    request: RolloutRequest,
    request_id: str = "mine",
    tasks: TaskDescriptions | None = None,
    not_started: Mapping[int, RolloutFailure] | None = None,
) -> list[Episode]:
    """Raises `RequestProblem` for an invalid request."""
    factory.refuse_invalid(request, tasks or {})
    valid = ValidRequest.of(request, request_id, tasks or {})
    return factory.groups(valid, range(len(request.samples)), not_started or {}, {})

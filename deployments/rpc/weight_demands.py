"""What a generation demands of the version of the weights, and whether a replica can meet it. No I/O."""

from deployments.failures import GenerationLost, OtherVersionLoaded, TokensTooOld
from deployments.protocols.generation import GenerationRequest


def refuse_other_version(request: GenerationRequest, loaded: int | None) -> None:
    """Refuses a generation that the weights of version `loaded` must not make.

    Args:
        loaded: of the policy that the request names; `None` if the replica does not have that policy.

    Raises:
        GenerationLost: they are older than `min_weight_version`.
        OtherVersionLoaded: they are not `weight_version`, or there are none of this policy.
        TokensTooOld: they are more than `max_staleness` versions ahead of `oldest_version`.
    """
    if loaded is None:
        raise OtherVersionLoaded(f"The generator replica does not have the policy {request.policy}.")
    if loaded < request.min_weight_version:
        raise GenerationLost(f"The generator replica is not at version {request.min_weight_version} yet.")
    if request.weight_version not in (None, loaded):
        raise OtherVersionLoaded(
            f"The generator replica has version {loaded} and not version {request.weight_version}, which must generate "
            "every token of the rollout."
        )
    if request.max_staleness is not None and request.oldest_version is not None:
        staleness = loaded - request.oldest_version
        if staleness > request.max_staleness:
            raise TokensTooOld(
                f"The conversation has tokens of version {request.oldest_version}, which is {staleness} versions "
                f"behind version {loaded}; policy.max_staleness allows {request.max_staleness}. Begin another one."
            )

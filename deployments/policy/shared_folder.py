"""Says at the start of a cluster of several nodes what is lost with the policy store's node."""

import logging
from pathlib import Path

from deployments.policy.cluster import Cluster

logger = logging.getLogger("rollout_service.policy")


async def warn_unless_shared(folder: Path, cluster: Cluster) -> None:
    """Looks from each other node for the store's folder, which exists."""
    if lacking := await cluster.nodes_that_lack(folder / "run.json"):
        logger.warning(
            "Not all nodes share the folder of the policy store, %s; these do not see it: %s. If the store's node is "
            "lost, so are the older versions and the unfinished uploads, and the current version has to be read back "
            "from a replica on another node. Set policy.folder to a folder that all nodes share.",
            folder,
            ", ".join(lacking),
        )

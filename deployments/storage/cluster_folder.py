"""Where records are kept that need not outlive the Ray cluster."""

from pathlib import Path

import ray

from deployments.storage.storage import Noun


def cluster_folder(noun: Noun) -> Path:
    """A folder of this Ray cluster on this machine."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / f"rollout-{noun}s"

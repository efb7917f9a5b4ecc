"""Where records are kept that need not outlive the Ray cluster."""

from pathlib import Path

import ray

from deployments.storage.storage import Noun


def cluster_folder(noun: Noun) -> Path:
    """A folder of this Ray cluster on this machine."""
    return session_folder() / f"rollout-{noun}s"


def session_folder() -> Path:
    """Where Ray keeps what is of this cluster on this machine: logs, sockets."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name()

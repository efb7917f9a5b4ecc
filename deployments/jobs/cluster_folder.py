"""Where jobs are kept that need not outlive the Ray cluster."""

from pathlib import Path

import ray


def cluster_jobs_folder() -> Path:
    """A folder of this Ray cluster on this machine."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "rollout-jobs"

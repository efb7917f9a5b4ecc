"""Clients of other collections against the running service: `requirements/beside.py` installs them, elsewhere the files
that need them are not collected."""

import os

OF_TARGETS = {
    "ROLLOUT_EVALUATORS": ("test_harbor_sandboxes.py",),
    "ROLLOUT_TINKER": ("test_tinker.py",),
    "ROLLOUT_TRAINERS": ("test_trainers.py", "test_published_deltas.py", "test_attached.py"),
}
collect_ignore = [name for variable, names in OF_TARGETS.items() if variable not in os.environ for name in names]

"""What needs packages of its own is tested by a target of its own, which installs these; elsewhere it is not collected.

Agents of frameworks: `make test-agents`. Evaluation harnesses: `make test-evals`.
"""

import os

OF_TARGETS = {
    "ROLLOUT_AGENTS": ("test_framework_agents.py", "test_nemo_gym_harness.py"),
    "ROLLOUT_EVALS": ("test_evaluations.py",),
}
collect_ignore = [name for variable, names in OF_TARGETS.items() if variable not in os.environ for name in names]

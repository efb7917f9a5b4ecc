"""The agents of frameworks are tested by `make test-agents`, which installs these; elsewhere they are not collected."""

import os

collect_ignore = [] if "ROLLOUT_AGENTS" in os.environ else ["test_framework_agents.py", "test_nemo_gym_harness.py"]

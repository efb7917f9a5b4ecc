"""Agents of frameworks are tested where their packages are: `python -m requirements.beside agents --test`."""

import os

collect_ignore = [] if "ROLLOUT_AGENTS" in os.environ else ["test_framework_agents.py"]

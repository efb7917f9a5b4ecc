"""Client of the rollout service."""

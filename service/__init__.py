"""The HTTP face and the rollout itself."""

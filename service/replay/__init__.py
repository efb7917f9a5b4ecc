"""Generates the tokens of a rollout again, and compares them; signs results, so that this can be trusted."""

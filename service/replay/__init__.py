"""Generates the tokens of a rollout again, and compares them."""

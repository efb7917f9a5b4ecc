"""Scores a sample of what the generator replicas generate on other replicas, and finds one that differs."""

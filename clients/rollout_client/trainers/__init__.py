"""Adapters to trainers; each needs the extra of its name."""

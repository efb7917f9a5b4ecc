"""Adapters to trainers; what needs an extra says which."""

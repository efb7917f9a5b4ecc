"""Adapters to trainers; each says which extra it needs."""

"""Sandboxes that live for a whole rollout: one interface, and a module for each provider of them."""

"""Malformed and hostile requests by the thousand: `python -m tests.endurance fuzz`."""

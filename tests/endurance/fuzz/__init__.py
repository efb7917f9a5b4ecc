"""Malformed and hostile requests by the thousand: `make fuzz`."""

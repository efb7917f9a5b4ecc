"""Random agents in sessions of a real service, and what must hold of every record."""

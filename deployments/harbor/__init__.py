"""Tasks in Harbor's format: what their folders hold, and how their verifiers judge."""

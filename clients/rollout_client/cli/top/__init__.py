"""`rollout top`: readings of a service's own reports, the rates between them, and how a terminal shows both."""

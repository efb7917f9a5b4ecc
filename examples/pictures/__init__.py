"""Pictures of what a running service reports: the spans of one request, the figures of the dashboard."""

"""The environment deployment, and one file for each task."""

"""The answer of `POST /rollout` in Arrow: its schemas, and rows as columns and back."""

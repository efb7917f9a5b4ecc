"""The commands of `rollout`, one file a subject. `app.py` puts them together."""

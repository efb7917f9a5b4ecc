"""The rollouts of a response as tables, as files, and as training data."""

"""What runs in the sandbox of a command, beside it."""

"""Programs that run in the sandbox, by their files. They import nothing of this repository."""

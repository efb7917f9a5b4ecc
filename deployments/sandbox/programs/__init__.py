"""Programs that run in processes of their own, by their files. They import nothing of this repository."""

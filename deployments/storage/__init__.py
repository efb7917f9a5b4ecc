"""Storage that outlives a store's process: records of bytes, in SQLite or Redis."""

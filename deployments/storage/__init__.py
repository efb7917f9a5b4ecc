"""What stores keep beyond their own process, in SQLite or Redis: records of bytes, whatever they mean."""

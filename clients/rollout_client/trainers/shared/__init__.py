"""What several trainer adapters use; no adapter itself."""

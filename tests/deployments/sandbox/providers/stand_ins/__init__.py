"""Stand-ins of a Docker engine and of `kubectl`, with the calls that ours makes, over sandboxes of bubblewrap."""

"""Stand-ins of the SDKs of companies, with the calls that ours makes of them, over sandboxes of bubblewrap."""

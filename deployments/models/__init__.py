"""Models that environments ask: judges over HTTP, and reward models in deployments of their own."""

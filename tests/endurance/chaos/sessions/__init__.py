"""Sessions whose agents, clients, ingress and generator replicas are killed."""

"""Requests that outlive their connection and their ingress replica. Store: `deployments/jobs`."""

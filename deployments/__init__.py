"""Deployments that the ingress calls: generators (vLLM or simulated), environments and the policy store."""

"""Deployments that the ingress calls: generators (vLLM), environments and the policy store."""

"""What the ingress calls: the vLLM generator, the environment host and the environments themselves."""

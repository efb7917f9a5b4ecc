"""Weights of a model on their way to the service: sources, safetensors files, deltas, chunked uploads, pushers."""

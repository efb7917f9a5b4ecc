"""The entry point of installations that are older than `deployments.vllm_plugin`."""

from deployments.vllm_plugin import install as request_tile_permission

__all__ = ["request_tile_permission"]

"""The task `code`: the model's Python against given tests, or as an interpreter over turns."""

from deployments.environments.code.environment import CodeEnvironment

__all__ = ["CodeEnvironment"]

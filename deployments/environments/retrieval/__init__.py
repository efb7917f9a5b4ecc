"""The task `retrieval`: questions to answer with a search of documents."""

from deployments.environments.retrieval.environment import RetrievalEnvironment

__all__ = ["RetrievalEnvironment"]

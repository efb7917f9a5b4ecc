"""Imports TRL's asynchronous trainer once, without the warnings that TRL gives on import."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rollout_client.trainers.trl_async  # noqa: F401

"""Deployments that the ingress calls: generators (vLLM), environments and the policy store.

A process that loads this looks for garbage seldom: the collector would take a fifth of the time of importing vLLM.
"""

import gc

gc.set_threshold(10_000, 2, 10)

"""The ingress: HTTP routes, and the rollout loop behind them."""

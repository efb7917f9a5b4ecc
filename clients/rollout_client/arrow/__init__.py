"""`POST /rollout` in Arrow: the schemas of both directions, the request's writer and the answer's reader."""

"""Records of rollouts that have ended, as the ingress writes and reads them. Store: `deployments/rollout_records`."""

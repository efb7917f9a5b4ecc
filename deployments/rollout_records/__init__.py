"""Records of rollouts that have ended: what each was, where and how its tokens were generated. Kept for a while."""

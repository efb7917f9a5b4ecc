"""`rollout run`: plays a file of samples in chunks and appends what has ended, so that it can be killed and go on."""

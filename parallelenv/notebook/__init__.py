"""What a notebook shows of a `ParallelEnv` and of its envs."""

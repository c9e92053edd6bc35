"""What a `ParallelEnv` shows of itself and of its envs."""

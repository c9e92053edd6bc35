"""Measures the speed of the modes of `ParallelEnv` and recommends a mode."""

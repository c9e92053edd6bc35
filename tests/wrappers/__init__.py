"""Wrappers around a whole `ParallelEnv`."""

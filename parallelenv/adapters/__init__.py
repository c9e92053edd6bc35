"""Adapters, one module per library: each gives a `ParallelEnv` the interface of another library."""

"""Adapters: a `ParallelEnv` with the interface of another library, one file per library."""

"""Notebook display: pictures and films of envs, profiles, and the display of a `ParallelEnv`."""

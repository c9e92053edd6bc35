"""What a notebook shows: pictures and films of envs, profiles, the portrait of a `ParallelEnv`."""

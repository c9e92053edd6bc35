"""A `ParallelEnv` in the shape that another library knows: one file each, imported when it is asked for."""

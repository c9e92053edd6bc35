"""A `ParallelEnv` in the shape that another library knows: one file per library."""

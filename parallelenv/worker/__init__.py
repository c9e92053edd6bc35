"""The code that runs with the envs, the same in every mode."""

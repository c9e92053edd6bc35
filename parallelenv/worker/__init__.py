"""The code that runs in the same process as the envs. It is the same in every mode."""

"""The code that runs in the same place as the envs. It is the same in every mode."""

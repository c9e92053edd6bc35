"""What runs beside the envs, the same in every mode."""

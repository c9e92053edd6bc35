"""What runs beside the envs, in every mode the same. Imports `parallelenv.contract` only."""

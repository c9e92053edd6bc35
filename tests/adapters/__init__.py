"""Adapters, compared with the vector envs that they replace."""

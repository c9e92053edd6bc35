"""Adapters, compared with what they stand for."""

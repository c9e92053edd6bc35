"""Measures the modes and recommends one."""

"""Rollouts, evaluations, and streams: policies that run for many steps in one call."""

"""Rollouts, evaluations and streams: ways to run a policy for many steps with one call."""

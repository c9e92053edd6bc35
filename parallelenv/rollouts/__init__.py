"""Rollouts, evaluations and streams: many steps of a policy in one call."""

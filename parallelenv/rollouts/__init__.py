"""Rollouts, evaluations and streams, which run many steps of a policy in one call."""

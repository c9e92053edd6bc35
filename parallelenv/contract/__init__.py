"""Plain data and rules that the caller, the workers and the backends share.

It imports nothing from this package except the errors.
"""

"""Plain data and rules that the caller, the workers and the backends share.

It imports nothing of this package except its errors.
"""

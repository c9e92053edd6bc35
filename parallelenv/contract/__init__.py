"""Plain data and rules that the caller, the workers and the backends share.

Imports nothing else of this package but its errors.
"""

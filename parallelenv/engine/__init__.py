"""The caller's side of every call: where each env is, what is in flight, what has come back."""

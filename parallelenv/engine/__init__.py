"""The caller's side of every call: where each env lives, what is in flight, which results have arrived."""

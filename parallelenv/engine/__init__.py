"""The caller's side of every call: where each env lives, which calls are in flight, and which results have arrived."""

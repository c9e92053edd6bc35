"""Side-by-side benchmarks: `python -m benchmarks` in the root of a checkout. See README.md in this folder."""

"""The tests of other libraries, run with our adapters in place of their vector envs."""
